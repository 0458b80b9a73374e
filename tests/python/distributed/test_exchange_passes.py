"""The passes around an exchange: what is sent, and the order in which experts find what came."""

import pytest
import torch
from moegemm.operators.loading import ops

SIZES = [(1, 1, 8), (33, 3, 70), (257, 40, 264), (500, 8, 2048)]  # tokens, topk, columns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "topk", "columns"), SIZES)
@pytest.mark.parametrize("wide", [False, True])
def test_every_slot_with_a_position_gets_the_bits_of_its_token(device, tokens, topk, columns, dtype, wide):
    ids = torch.randint(-1, 16, (tokens, topk), device=device)
    sizes, gather_indices, positions = ops.route_compact(ids, 16, tokens * topk, None, None, wide, False)
    sent = int(sizes.sum())
    x = torch.randn(tokens, columns, device=device).to(dtype)
    x[0, :4] = torch.tensor([-0.0, float("nan"), float("inf"), 0.0])
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    expected = x.view(bits)[gather_indices[:sent].long() // topk]
    assert torch.equal(ops.spread_rows(x, positions, None, sent).view(bits), expected)
    with_room = ops.spread_rows(x, positions, gather_indices, tokens * topk).view(bits)
    assert torch.equal(with_room[:sent], expected)
    assert not with_room[sent:].any()


def test_rows_that_are_apart_are_spread_too(device):
    wide = torch.randn(20, 48, device=device)
    positions = torch.randperm(40, device=device).view(20, 2)
    expected = torch.empty(40, 33, device=device)
    expected[positions.view(-1)] = wide[:, 3:36].repeat_interleave(2, 0)
    assert torch.equal(ops.spread_rows(wide[:, 3:36], positions, None, 40), expected)


@pytest.mark.parametrize(("ranks", "experts"), [(1, 1), (2, 4), (8, 16), (300, 3), (4, 700)])
@pytest.mark.parametrize("with_room", [False, True])
def test_arrivals_are_sorted_by_expert_and_then_by_rank(device, ranks, experts, with_room):
    counts = torch.randint(0, 9, (ranks, experts + 2), device=device)[:, :experts]  # as it comes with notes
    counts = counts * (torch.rand(counts.shape, device=device) > 0.3)
    room = int(counts.sum(1).max()) + 2 if with_room else -1
    ids = []
    for of_rank in counts.tolist():
        mine = [expert for expert, count in enumerate(of_rank) for _ in range(count)]
        ids += mine + [experts] * (room - len(mine) if with_room else 0)
    expected = torch.tensor(ids, dtype=torch.int64)
    known = int(counts.sum())
    sizes, gather_indices, found = ops.index_arrivals(counts, len(ids), room)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(sizes.cpu().long(), torch.bincount(expected, minlength=experts + 1)[:experts])
    assert torch.equal(gather_indices.cpu().long()[:known], expected.sort(stable=True).indices[:known])
    assert (gather_indices[known:] == -1).all()


@pytest.mark.parametrize(("tokens", "topk", "ranks"), [(1, 1, 1), (40, 3, 2), (300, 8, 8), (70, 40, 1500)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_token_is_sent_once_to_each_rank_with_its_experts_there(device, tokens, topk, ranks, dtype):
    here = 4
    ids = torch.randint(-2, ranks * here + 2, (tokens, topk), device=device, dtype=dtype)
    firsts, pairs = ops.first_slots(ids, here, ranks)
    named = (ids >= 0) & (ids < ranks * here)
    owners = torch.where(named, ids.long() // here, -1)
    expected_pairs = torch.bincount(owners[named].cpu(), minlength=ranks)
    assert torch.equal(pairs.cpu(), expected_pairs)
    again = (owners.unsqueeze(2) == owners.unsqueeze(1)).tril(-1).any(2)
    assert torch.equal(firsts, torch.where(again, -1, owners))
    _, slots, _ = ops.route_compact(firsts, ranks, tokens * topk, None, None, False, False)
    found = ops.ids_at_target(ids, slots, here)
    sent = (slots >= 0).cpu()
    target = owners.view(-1)[slots.clamp(min=0).long()].unsqueeze(1)
    of_token = owners[slots.clamp(min=0).long() // topk]
    expected = torch.where(of_token == target, ids[slots.clamp(min=0).long() // topk] - target * here, -1)
    assert torch.equal(found.cpu()[sent], expected.cpu()[sent])
    assert (found.cpu()[~sent] == -1).all()
