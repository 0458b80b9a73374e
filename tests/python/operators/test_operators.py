"""torch.library.opcheck on every operator: schema, mutation, fake kernel, tracing."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from moegemm.operators.options import ACCUMULATE, DY_PER_TOKEN, MULTIPLY, PERMUTE_X, PERMUTE_Y, TRANSPOSED

OPS = torch.ops.moegemm


def call_options(case) -> str:
    return case.permute_x * PERMUTE_X + case.permute_y * PERMUTE_Y + case.fuse_mul_post * MULTIPLY


def arguments(case, first, second) -> tuple:
    return first, second, case.m_sizes, case.gather_indices, case.topk_weights, case.topk, call_options(case)


@pytest.mark.parametrize("flags", FLAGS)
def test_products(device, flags):
    case = make_case(device, flags, torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    torch.library.opcheck(OPS.forward.default, arguments(case, case.X, case.W))
    torch.library.opcheck(OPS.dx.default, arguments(case, dY, case.W))
    torch.library.opcheck(OPS.dw.default, arguments(case, dY, case.X))
    config = moegemm.KernelConfigForward(64, 64, 32).numbers("config", call_options(case))
    torch.library.opcheck(OPS.forward.default, (*arguments(case, case.X, case.W), config))


def test_plain_product(device):
    case = make_case(device, "plain", torch.bfloat16)
    torch.library.opcheck(OPS.forward_plain.default, (case.X, case.W, case.m_sizes))
    Y = OPS.forward_plain(case.X, case.W, case.m_sizes)
    assert torch.equal(Y, OPS.forward(*arguments(case, case.X, case.W)))


def test_products_into_out(device):
    case = make_case(device, "permute_x", torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    Y, dX = torch.empty_like(dY), torch.empty(case.rows, 40, device=device, dtype=torch.bfloat16)
    torch.library.opcheck(OPS.forward_out.default, (*arguments(case, case.X, case.W), None, Y))
    bias = torch.randn(5, 24, device=device).bfloat16()
    torch.library.opcheck(OPS.forward_out.default, (*arguments(case, case.X, case.W), None, Y, bias))
    torch.library.opcheck(OPS.dx_out.default, (*arguments(case, dY, case.W), None, dX))
    dW = torch.zeros(case.W.shape, device=device)
    accumulating = list(arguments(case, dY, case.X))
    accumulating[-1] += ACCUMULATE
    torch.library.opcheck(OPS.dw_out.default, (*accumulating, None, dW))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_epilogues(device, transposed):
    case = make_case(device, "permute_x", torch.bfloat16)
    w = case.W.transpose(1, 2).contiguous() if transposed else case.W
    options = TRANSPOSED * transposed
    bias = torch.randn(5, 24, device=device).bfloat16()
    routing = (case.m_sizes, case.gather_indices)
    for layout in ("none", "concatenated", "interleaved"):
        activated = (case.X, w, *routing, None, case.topk, options + PERMUTE_X, None, bias, f"silu/{layout} limit=7")
        torch.library.opcheck(OPS.forward.default, activated)
    rows = torch.randn(case.rows, 40, device=device).bfloat16()
    torch.library.opcheck(OPS.forward.default, (rows, w, *routing, None, case.topk, options + PERMUTE_Y, None, bias))
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    for order in ("", PERMUTE_X):
        torch.library.opcheck(OPS.dx.default, (dY, w, *routing, None, case.topk, options + order))
    torch.library.opcheck(OPS.dw.default, (dY, rows, *routing, None, case.topk, options))


@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_a_low_rank_part(device, transposed):
    case = make_case(device, "permute_x", torch.bfloat16)
    w = case.W.transpose(1, 2).contiguous() if transposed else case.W
    options, rank = TRANSPOSED * transposed, 6
    thin = torch.randn(case.rows, rank, device=device).bfloat16()
    of_forward, of_dx = (torch.randn(5, n, rank, device=device).bfloat16() for n in (24, 40))
    b = of_forward.transpose(1, 2).contiguous() if transposed else of_forward
    a = of_dx if transposed else of_dx.transpose(1, 2).contiguous()
    routing = (case.m_sizes, case.gather_indices)
    bias = torch.randn(5, 24, device=device).bfloat16()
    forward = (case.X, w, *routing, thin, b, case.topk, options + PERMUTE_X, bias)
    torch.library.opcheck(OPS.forward_low_rank.default, forward)
    torch.library.opcheck(OPS.forward_low_rank.default, (*forward, "silu/concatenated limit=7"))
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    for order in ("", PERMUTE_X):
        torch.library.opcheck(OPS.dx_low_rank.default, (dY, w, *routing, thin, a, case.topk, options + order))


def test_a_low_rank_part_is_rounded_with_its_product(device):
    """In float64 the result is off by one rounding, not by that of a sum of two rounded products."""
    case = make_case(device, "plain", torch.bfloat16, n=64, k=128)
    thin, b = torch.randn(case.rows, 16, device=device).bfloat16(), torch.randn(5, 64, 16, device=device).bfloat16()
    got = OPS.forward_low_rank(case.X, case.W, case.m_sizes, None, thin, b).double()
    expert = torch.repeat_interleave(torch.arange(5, device=device), case.m_sizes.long())
    rows = expert.size(0)
    exact = torch.einsum("rk,rnk->rn", case.X[:rows].double(), case.W[expert].double())
    exact += torch.einsum("rk,rnk->rn", thin[:rows].double(), b[expert].double())
    assert ((got[:rows] - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()
    assert not got[rows:].any()


@pytest.mark.parametrize("activation", ["", "silu/concatenated limit=7"])
@pytest.mark.parametrize("first", [0, 1])
def test_weights_in_two_tensors_have_the_bits_of_one(device, activation, first):
    """`first` of both lies first in memory."""
    case = make_case(device, "permute_x", torch.bfloat16)
    both = case.W.new_empty(2, case.W.size(0), case.W.size(1) // 2, case.W.size(2))
    w, w_up = both[first].copy_(case.W.chunk(2, 1)[0]), both[1 - first].copy_(case.W.chunk(2, 1)[1])
    bias = torch.randn(case.W.shape[:2], device=device, dtype=torch.bfloat16)
    arguments = (case.m_sizes, case.gather_indices)
    rest = (case.topk, " permute_x", bias, activation)
    torch.library.opcheck(OPS.forward_pair.default, (case.X, w, w_up, *arguments, *rest))
    whole = OPS.forward(case.X, case.W, *arguments, None, rest[0], rest[1], None, bias, activation)
    assert torch.equal(OPS.forward_pair(case.X, w, w_up, *arguments, *rest), whole)


def test_weights_in_two_tensors_have_one_pitch(device):
    case = make_case(device, "plain", torch.bfloat16)
    columns = case.W.size(2)
    w, w_up = (torch.nn.functional.pad(half, (0, 8))[..., :columns] for half in case.W.chunk(2, 1))
    whole = OPS.forward(case.X, case.W, case.m_sizes)
    assert torch.equal(OPS.forward_pair(case.X, w, w_up, case.m_sizes), whole)
    with pytest.raises(RuntimeError, match=f"w_up has row_stride {columns + 8}; it must be that of W, {columns}"):
        OPS.forward_pair(case.X, w.contiguous(), w_up, case.m_sizes)


def test_weights_in_two_tensors_look_alike():
    case = make_case("cpu", "plain", torch.float32)
    with pytest.raises(RuntimeError, match=r"w_up is .*\[5, 7, 40\].*; it must be as W"):
        OPS.forward_pair(case.X, case.W, case.W.new_zeros(5, 7, 40), case.m_sizes)


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        ((8, 4), (5, 24, 4), r"low_rank_rows is .*; its shape must be \[M, r\]"),
        ((None, 4), (5, 24, 5), r"low_rank_weights is .*\[5, 24, 5\].*; its shape must be \[E, N, r\] = \[5, 24, 4\]"),
        ((None, 4), (4, 24, 4), r"low_rank_weights is .*\[E, N, r\] = \[5, 24, 4\]"),
        ((None, 0), (5, 24, 0), r"low_rank_rows .*r must be at least 1"),
    ],
)
def test_a_low_rank_part_that_does_not_fit_is_refused(rows, weights, message):
    case = make_case("cpu", "plain", torch.float32)
    thin = torch.zeros(rows[0] or case.rows, rows[1])
    with pytest.raises(RuntimeError, match=message):
        OPS.forward_low_rank(case.X, case.W, case.m_sizes, None, thin, torch.zeros(weights))
    with pytest.raises(RuntimeError, match="has dtype bf16; it must have fp32"):
        OPS.forward_low_rank(
            case.X, case.W, case.m_sizes, None, torch.zeros(case.rows, 2).bfloat16(), torch.zeros(5, 24, 2)
        )


def test_check_layer(device):
    x, ids = torch.randn(6, 8, device=device), torch.randint(3, (6, 2), device=device)
    weights = (torch.randn(3, 20, 8, device=device), torch.randn(3, 8, 10, device=device))
    arguments = (x, *weights, ids, torch.rand(6, 2, device=device), None, None, "silu/concatenated", False)
    torch.library.opcheck(OPS.check_layer.default, arguments)
    pair = tuple(weights[0].chunk(2, 1))
    torch.library.opcheck(OPS.check_layer.default, (x, pair[0], *arguments[2:], pair[1]))
    rows = (x, *weights, torch.tensor([3, 0, 2], device=device), torch.rand(6, device=device), *arguments[5:])
    torch.library.opcheck(OPS.check_expert_rows.default, rows)


@pytest.mark.parametrize("with_inverse", [False, True])
def test_route(device, with_inverse):
    ids = torch.randint(5, (7, 2), device=device)
    torch.library.opcheck(OPS.route.default, (ids, 5, False, with_inverse))


@pytest.mark.parametrize("limited", [False, True])
def test_route_compact(device, limited):
    ids = torch.randint(-1, 9, (7, 2), device=device)
    limits = [torch.tensor([n], device=device, dtype=torch.int32) for n in (5, 0)] if limited else [None, None]
    torch.library.opcheck(OPS.route_compact.default, (ids, 5, 6, *limits, False, False))


@pytest.mark.parametrize("gaps", [False, True])
def test_spread_rows(device, gaps):
    ids = torch.randint(-1 if gaps else 0, 5, (7, 2), device=device)
    _, gather_indices, positions = OPS.route_compact(ids, 5, 14, None, None, False, False)
    rows = torch.randn(7, 8, device=device)
    torch.library.opcheck(OPS.spread_rows.default, (rows, positions, gather_indices if gaps else None, 14))


def test_first_slots_and_ids_at_target(device):
    ids = torch.randint(-1, 13, (7, 3), device=device)
    torch.library.opcheck(OPS.first_slots.default, (ids, 4, 3))
    slots = torch.tensor([0, 20, -1, 5], device=device)
    torch.library.opcheck(OPS.ids_at_target.default, (ids, slots, 4))


@pytest.mark.parametrize("room", [-1, 9])
def test_index_arrivals(device, room):
    counts = torch.tensor([[1, 0, 3], [2, 2, 0]], device=device)
    torch.library.opcheck(OPS.index_arrivals.default, (counts, 8 if room < 0 else 18, room))


@pytest.mark.parametrize("weighted", [False, True])
def test_combine_rows(device, weighted):
    rows = torch.randn(9, 8, device=device, requires_grad=True)
    weights = torch.rand(7, 2, device=device, requires_grad=True) if weighted else None
    positions = torch.randperm(14, device=device).view(7, 2) - 4
    torch.library.opcheck(OPS.combine_rows.default, (rows, weights, positions, False))
    out = torch.empty(7, 8, device=device)
    torch.library.opcheck(OPS.combine_rows_out.default, (rows.detach(), weights, positions, out))


@pytest.mark.parametrize("weighted", [False, True])
def test_combine(device, weighted):
    rows = torch.randn(14, 8, device=device, requires_grad=True)
    weights = torch.rand(7, 2, device=device, requires_grad=True) if weighted else None
    torch.library.opcheck(OPS.combine.default, (rows, weights, 2, False))
    out = torch.empty(7, 8, device=device)
    torch.library.opcheck(OPS.combine_out.default, (rows.detach(), weights, 2, out))


def test_scale_rows(device):
    case = make_case(device, "permute_y_mul", torch.bfloat16)
    product = torch.randn_like(case.X)
    routing = (case.m_sizes, case.gather_indices, case.topk_weights, case.topk)
    torch.library.opcheck(OPS.scale_rows.default, (product, case.X, *routing))


def test_dy_per_token(device):
    case = make_case(device, "permute_y", torch.bfloat16)
    dY = torch.randn(case.rows // case.topk, 24, device=device).bfloat16()
    options = PERMUTE_Y + DY_PER_TOKEN
    torch.library.opcheck(OPS.dx.default, (*arguments(case, dY, case.W)[:-1], options))
    torch.library.opcheck(OPS.dw.default, (*arguments(case, dY, case.X)[:-1], options))


def test_activations(device):
    case = make_case(device, "permute_y_mul", torch.bfloat16)
    routing = (case.m_sizes, case.gather_indices, case.topk_weights, case.topk)
    pre, bias = torch.randn_like(case.X), torch.randn(5, 40, device=device).bfloat16()
    d_act = torch.randn(case.rows, 20, device=device).bfloat16()
    d_out, down_bias = torch.randn(13, 8, device=device).bfloat16(), torch.randn(5, 8, device=device).bfloat16()
    activation = "silu/concatenated limit=7"
    torch.library.opcheck(OPS.activate.default, (pre, bias, case.m_sizes, activation))
    row_weights = torch.rand(case.rows, device=device)
    torch.library.opcheck(OPS.activate.default, (pre, bias, case.m_sizes, activation, row_weights))
    by_row = (case.m_sizes, None, row_weights, 1, None, None, activation, True, True)
    torch.library.opcheck(OPS.activate_backward.default, (d_act, pre, bias, *by_row))
    rows, out = torch.randn(case.rows, 8, device=device), torch.empty(case.rows, 8, device=device).bfloat16()
    torch.library.opcheck(OPS.add_weighted_bias.default, (rows, down_bias, case.m_sizes, row_weights, out))
    for needs in [(True, True), (False, False)]:
        share = (d_out, down_bias) if needs[1] else (None, None)
        torch.library.opcheck(OPS.activate_backward.default, (d_act, pre, bias, *routing, *share, activation, *needs))


def test_expert_sums(device):
    case = make_case(device, "permute_y_mul", torch.bfloat16)
    torch.library.opcheck(OPS.expert_sums.default, (case.X, case.m_sizes, None, None, 1))
    d_out = torch.randn(13, 8, device=device)
    routing = (case.m_sizes, case.gather_indices, case.topk_weights, case.topk)
    torch.library.opcheck(OPS.expert_sums.default, (d_out, *routing))
