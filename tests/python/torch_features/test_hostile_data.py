"""The same bits each time, and nothing that is not a number, whatever the routing says and padding holds."""

import moegemm
import pytest
import torch
from conftest import DEVICES, FLAGS, make_case
from public_calls import PUBLIC_CALLS
from raw_calls import RAW, raw_call
from reference import Case

NAN = float("nan")
SIZES = {"negative": [5, -3, 7, 0, 6], "beyond the rows": [9, 0, 9, 2**31 - 1, -1], "none": [0, -1, 0, 0, -(2**31)]}
TAILS = {"-1": -1, "zero": 0, "beyond the rows": 2**31 - 1}


def poison(device: str) -> None:
    """Fills memory that allocators are likely to hand out next, so that an element that nobody writes is seen."""
    kept = [torch.full((n,), NAN, device=device) for n in (26, 26 * 12, 26 * 20, 26 * 24, 26 * 40, 5 * 24 * 40)]
    del kept


def hostile(device: str, flags: str, sizes: str, tail: str, dtype: torch.dtype) -> tuple[Case, torch.Tensor]:
    """A case of 26 rows and its dY. NaN stands wherever no result may depend on it."""
    case = make_case(device, flags, dtype)
    case.m_sizes = torch.tensor(SIZES[sizes], dtype=torch.int32, device=device)
    used = min(sum(max(size, 0) for size in SIZES[sizes]), 26)
    dY = torch.randn(26, 24).to(device, dtype)
    for expert, size in enumerate(SIZES[sizes]):
        if size <= 0:
            case.W[expert] = NAN
    if not case.permute_y:
        dY[used:] = NAN
    if not case.permute_x:
        case.X[used:] = NAN
    if case.gather_indices is None:
        return case, dY
    order = torch.randperm(used)
    bad = {2: -1, 7: 26, 11: 2**31 - 1, 13: -(2**31)}
    lost = [int(order[position]) for position in bad if position < used]
    indices = torch.cat([order, torch.full((26 - used,), TAILS[tail])])
    for position, index in bad.items():
        if position < used:
            indices[position] = index
    case.gather_indices = indices.to(device, torch.int32)
    if case.permute_y:  # rows of dY that no position names, and of X opposite an index out of range
        dY[used:] = NAN
        dY[lost] = NAN
        case.X[[position for position in bad if position < used]] = NAN
    if case.topk_weights is not None:
        weights = case.topk_weights.view(-1)
        weights[used:] = NAN
        weights[lost] = NAN
    return case, dY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", RAW)
def test_products_of_hostile_routing_repeat_and_are_finite(device, name, flags, sizes, tail, dtype):
    case, dY = hostile(device, flags, sizes, tail, dtype)
    results = []
    for _ in range(3):
        poison(device)
        results.append(raw_call(name, case, dY=dY))
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("flags", FLAGS)
def test_gradients_of_hostile_routing_repeat_and_are_finite(device, flags, sizes, tail):
    case, dY = hostile(device, flags, sizes, tail, torch.bfloat16)
    results = []
    for _ in range(3):
        poison(device)
        leaves = case.map_values(lambda t: t.detach().clone().requires_grad_())
        Y = moegemm.grouped_gemm(**leaves.arguments())
        wanted = [t for t in (leaves.X, leaves.W, leaves.topk_weights) if t is not None]
        results.append([Y, *torch.autograd.grad(Y, wanted, dY)])
    assert all(torch.isfinite(t).all() for t in results[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_rows_that_are_read_twice_repeat(device):
    """Duplicates are deterministic wherever rows are only read: gathered X forward and in dW, gathered dY in dW."""
    for flags, name in (("permute_x", RAW[0]), ("permute_x", RAW[2]), ("permute_y", RAW[1]), ("permute_y", RAW[2])):
        case = make_case(device, flags, torch.bfloat16)
        case.gather_indices[5:20] = case.gather_indices[3]
        first, second = raw_call(name, case), raw_call(name, case)
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_with_ids_of_no_expert_repeats_and_is_finite(device, transposed):
    torch.manual_seed(3)
    T, H, inner, E = 30, 40, 24, 5
    shapes = [(E, 2 * inner, H), (E, H, inner)]
    weights = [torch.randn(s).transpose(1, 2).contiguous() if transposed else torch.randn(s) for s in shapes]
    weights = [w.to(device, torch.bfloat16) for w in weights]
    ids = torch.randint(E, (T, 3))
    ids[::4, 0], ids[1::4, 1], ids[2::5, 2] = -1, E, 2**40
    ids[7] = -(2**50)
    ids[ids == 1] = 0
    x, router = torch.randn(T, H).to(device, torch.bfloat16), torch.rand(T, 3).to(device)
    x[7] = NAN  # a token of no expert, and an expert of no token
    for w in weights:
        w[1] = NAN
    results = []
    for _ in range(3):
        poison(device)
        leaves = [t.clone().requires_grad_() for t in (x, *weights, router)]
        out = moegemm.moe_mlp(*leaves[:3], ids.to(device), leaves[3], transposed=transposed)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(torch.isfinite(t).all() for t in results[0])
    assert not results[0][0][7].any()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", PUBLIC_CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_every_public_call_repeats_its_bits(device, name):
    step = PUBLIC_CALLS[name](device)
    first = step()
    for _ in range(3):
        poison(device)
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
