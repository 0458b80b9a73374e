"""Dispatchers on their own: what arrives where, what does not fit, and what every rank is told when one goes wrong."""

import moegemm
import pytest
import torch
import torch.distributed as dist
from distributed.cases import BY_NAME, build, leaf
from distributed.test_bits import run
from moegemm.distributed import AllToAll, expert_parallel_mlp

SIZES = [2, 4]


def refusal(call) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def close_to_one_process(names: list[str], of_dispatcher: dict) -> dict[str, float]:
    """How far this rank's results are from those of one process, as a share of their norm."""
    rank, size = dist.get_rank(), dist.get_world_size()
    worst = {}
    for name in names:
        layer = build(BY_NAME[name], size, torch.float32)
        expected = run(layer, slice(None), slice(None), moegemm.moe_mlp)
        dispatcher = AllToAll(None, layer.case.experts, **of_dispatcher)
        tokens, experts = layer.tokens_of(rank), layer.experts_of(rank)
        found = run(layer, tokens, experts, lambda *t, d=dispatcher, **o: expert_parallel_mlp(*t, dispatcher=d, **o))
        dispatcher.check()
        for what, value in found.items():
            if value is None:
                assert expected[what] is None, (name, what)
                continue
            whole = expected[what][tokens if what in ("out", "d x", "d router_weights") else experts]
            error = (value - whole).norm() / whole.norm().clamp(min=1e-6)
            worst[name] = max(worst.get(name, 0.0), float(error))
    return worst


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("room", [None, 700])
def test_a_token_sent_once_per_rank_gives_the_layer(ranks, size, room):
    names = list(BY_NAME)
    for found in ranks(size).run(close_to_one_process, names, {"unique": True, "rows_per_peer": room}):
        assert max(found.values()) < 2e-6, found


def repeated_expert(dispatcher, experts: int = 2) -> float:
    """How far a layer is from one process where every token names one expert three times, and another one once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(3)
    x, weights = torch.randn(6, 8, generator=random), torch.rand(6, 4, generator=random)
    w_gate_up, w_down = torch.randn(experts, 8, 8, generator=random), torch.randn(experts, 8, 4, generator=random)
    ids = torch.tensor([[0, 0, 1, 0]]).expand(6, -1).contiguous()
    here = slice(rank * experts // size, (rank + 1) * experts // size)
    out = expert_parallel_mlp(x, w_gate_up[here], w_down[here], ids, weights, dispatcher=dispatcher)
    return float((out - moegemm.moe_mlp(x, w_gate_up, w_down, ids, weights)).abs().max())


def repeated_expert_once_per_rank() -> float:
    return repeated_expert(AllToAll(None, 2, unique=True, rows_per_peer=6))


def test_no_slot_of_a_repeated_expert_is_lost(ranks):
    assert max(ranks(2).run(repeated_expert_once_per_rank)) < 1e-5


def rows_on_the_way(unique: bool) -> tuple[int, int]:
    layer = build(BY_NAME["topk 8"], dist.get_world_size(), torch.float32)
    mine = layer.tokens_of(dist.get_rank())
    sent = AllToAll(None, 16, unique=unique).dispatch(layer.x[mine], layer.ids[mine], layer.router_weights[mine])
    return sent.rows.size(0), int(((sent.expert_ids >= 0) & (sent.expert_ids < 16 // dist.get_world_size())).sum())


def test_unique_sends_a_token_once_to_a_rank(ranks):
    slots, tokens = ranks(2).run(rows_on_the_way, False), ranks(2).run(rows_on_the_way, True)
    assert [pairs for _, pairs in slots] == [pairs for _, pairs in tokens]
    assert sum(rows for rows, _ in slots) == 8 * (7 + 5)
    assert sum(rows for rows, _ in tokens) <= 2 * (7 + 5)


def own_experts() -> float:
    """dispatch and combine around experts in plain torch, forward and backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = build(BY_NAME["duplicate ids"], size, torch.float32)
    mine, experts = layer.tokens_of(rank), layer.experts_of(rank)
    x, weights = leaf(layer.x[mine]), leaf(layer.router_weights[mine])
    dispatcher = AllToAll(None, layer.case.experts)
    sent = dispatcher.dispatch(x, layer.ids[mine], weights)
    first, second = layer.w_gate_up[experts], layer.w_down[experts]
    gate, up = torch.einsum("rh,rch->rc", sent.rows, first[sent.expert_ids[:, 0]]).chunk(2, -1)
    rows = torch.einsum("ri,rhi->rh", torch.nn.functional.silu(gate) * up, second[sent.expert_ids[:, 0]])
    out = dispatcher.combine(rows, sent)
    out.backward(layer.d_out[mine])
    expected = run(layer, slice(None), slice(None), moegemm.moe_mlp)
    pairs = [(out, expected["out"]), (x.grad, expected["d x"]), (weights.grad, expected["d router_weights"])]
    return max(float((got - whole[mine]).abs().max()) for got, whole in pairs)


def test_dispatch_and_combine_serve_experts_in_torch(ranks):
    assert max(ranks(2).run(own_experts)) < 1e-5


def too_little_room() -> tuple[str, bool, list[int]]:
    layer = build(BY_NAME["all to one expert"], dist.get_world_size(), torch.float32)
    mine, experts = layer.tokens_of(dist.get_rank()), layer.experts_of(dist.get_rank())
    dispatcher = AllToAll(None, 8, rows_per_peer=12)
    weights = layer.router_weights[mine]
    out = expert_parallel_mlp(
        layer.x[mine], layer.w_gate_up[experts], layer.w_down[experts], layer.ids[mine], weights, dispatcher=dispatcher
    )
    whole = moegemm.moe_mlp(layer.x[mine], layer.w_gate_up, layer.w_down, layer.ids[mine], weights)
    kept = torch.equal(out[:5], whole[:5])  # of 7 and 5 tokens with 2 slots 12 slots fit
    return refusal(dispatcher.check), kept, dispatcher.overflow.tolist()


def test_rows_that_do_not_fit_are_dropped_and_every_rank_is_told(ranks):
    for message, kept, overflow in ranks(2).run(too_little_room):
        assert kept
        assert overflow == [2, 0]
        assert message.startswith("ValueError: rows_per_peer is 12; rank 0 had up to 14 rows for one rank, and left")


def disagreements() -> dict[str, str]:
    """What this rank is told where the last one does something else."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    layer = build(BY_NAME["random"], dist.get_world_size(), torch.float32)
    mine, experts = layer.tokens_of(dist.get_rank()), layer.experts_of(dist.get_rank())
    x, ids, weights = layer.x[mine], layer.ids[mine], layer.router_weights[mine]
    w_gate_up, w_down = layer.w_gate_up[experts], layer.w_down[experts]
    told = {}
    told["experts"] = refusal(lambda: AllToAll(None, 9))
    told["room"] = refusal(lambda: AllToAll(None, 8, rows_per_peer=4 if odd else 5))
    told["no room"] = refusal(lambda: AllToAll(None, 8, rows_per_peer=0 if odd else 5))
    for room in (None, 100):
        dispatcher = AllToAll(None, 8, rows_per_peer=room)

        def call(x=x, ids=ids, weights=weights, w_down=w_down, dispatcher=dispatcher):
            return expert_parallel_mlp(x, w_gate_up, w_down, ids, weights, dispatcher=dispatcher)

        told[f"dtype of ids {room}"] = refusal(lambda call=call: call(ids=ids.int() if odd else ids))
        told[f"gradient {room}"] = refusal(lambda call=call: call(x=x.clone().requires_grad_(odd)))
        told[f"refused {room}"] = refusal(lambda call=call: call(w_down=w_down[:, :5] if odd else w_down))
        told[f"topk {room}"] = refusal(
            lambda call=call: call(ids=ids[:, :1], weights=weights[:, :1]) if odd else call()
        )
        told[f"after {room}"] = str(call().shape == x.shape)
    stacks = w_gate_up, w_down
    told["keyword"] = refusal(lambda: expert_parallel_mlp(x, *stacks, ids, weights, dispatcher=dispatcher, max_rows=3))
    sent = dispatcher.dispatch(x, ids, weights)
    dispatcher.combine(sent.rows, sent)
    told["twice"] = refusal(lambda: dispatcher.combine(sent.rows, sent))
    told["other rows"] = refusal(lambda: dispatcher.combine(x[:1], dispatcher.dispatch(x, ids, weights)))
    told["nobody"] = refusal(lambda: expert_parallel_mlp(x, w_gate_up, w_down, ids, weights))
    return told


def test_every_rank_is_told_what_is_wrong_with_one(ranks):
    told = ranks(2).run(disagreements)
    for rank, of_rank in enumerate(told):
        assert "num_experts is 9; it must be a multiple of the 2 ranks" in of_rank["experts"]
        assert "rows_per_peer is 5 on rank 0, 4 on rank 1; all ranks" in of_rank["room"]
        assert "rows_per_peer is 0; None or an int of at least 1" in of_rank["no room"]
        for room in (None, 100):
            assert "the dtype of expert_ids is torch.int64 on rank 0, torch.int32" in of_rank[f"dtype of ids {room}"]
            assert "requires_grad of x is False on rank 0, True on rank 1" in of_rank[f"gradient {room}"]
            assert "topk is 2 on rank 0, 1 on rank 1" in of_rank[f"topk {room}"]
            assert "w_down is fp32[4, 5, 20]" in of_rank[f"refused {room}"]
            assert ("rank 1 of the expert-parallel group refused" in of_rank[f"refused {room}"]) == (rank == 0)
            assert of_rank[f"after {room}"] == "True"
        assert "unexpected keyword argument 'max_rows'" in of_rank["keyword"]
        assert "one combine per dispatch" in of_rank["twice"]
        assert "the rows that were dispatched" in of_rank["other rows"]
        assert "mesh and dispatcher are None" in of_rank["nobody"]


def fuzz(count: int, seed: int) -> int:
    """Random routings, rank sizes and dispatchers; how many were run. A mismatch raises with what was asked for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(seed)
    dispatchers = [AllToAll(None, 8), AllToAll(None, 8, rows_per_peer=24), AllToAll(None, 8, unique=True)]
    w_gate_up, w_down = torch.randn(8, 12, 6, generator=random), torch.randn(8, 6, 6, generator=random)
    here = slice(rank * 8 // size, (rank + 1) * 8 // size)
    for number in range(count):
        dispatcher = dispatchers[number % len(dispatchers)]
        counts = torch.randint(0, 9, (size,), generator=random)
        counts[torch.rand(size, generator=random) < 0.25] = 0
        topk = int(torch.randint(1, 4, (), generator=random))
        total = int(counts.sum())
        ids = torch.randint(-1, 8, (total, topk), generator=random)
        if number % 5 == 0:
            ids = ids.clamp(max=1)  # most ranks receive nothing
        x, weights = torch.randn(total, 6, generator=random), torch.rand(total, topk, generator=random)
        mine = slice(int(counts[:rank].sum()), int(counts[: rank + 1].sum()))
        own = [leaf(x[mine]), leaf(w_gate_up[here]), leaf(w_down[here]), leaf(weights[mine])]
        all_of_them = [leaf(x), leaf(w_gate_up), leaf(w_down), leaf(weights)]
        out = expert_parallel_mlp(own[0], own[1], own[2], ids[mine], own[3], dispatcher=dispatcher)
        whole = moegemm.moe_mlp(all_of_them[0], all_of_them[1], all_of_them[2], ids, all_of_them[3])
        out.sum().backward()
        whole.sum().backward()
        wheres = (mine, here, here, mine)
        pairs = [(out, whole[mine]), *((o.grad, a.grad[w]) for o, a, w in zip(own, all_of_them, wheres, strict=True))]
        for got, expected in pairs:
            same = torch.allclose(got, expected, atol=1e-4) if dispatcher.unique else torch.equal(got, expected)
            assert same, f"call {number} with {dispatcher}: tokens {counts.tolist()}, ids {ids.tolist()}"
    return count


@pytest.mark.parametrize("size", SIZES)
def test_a_thousand_routings_neither_hang_nor_differ(ranks, size):
    assert ranks(size).run(fuzz, 1000, size, seconds=120) == [1000] * size
