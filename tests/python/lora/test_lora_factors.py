"""The factors of adapters in any memory layout and of any rank: what PEFT keeps, read and given gradients in place."""

import moegemm
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_reference import make_layer, reference_gradients, relative_error
from moegemm.lora.function import _lie_aligned
from moegemm.operators.loading import ops
from test_lora import EXPERTS, HIDDEN, INNER, SIXTEEN_BIT, dense, run

SCALING = 1.5


def peft_factors(k: int, n: int, rank: int, device: str, dtype: torch.dtype = torch.float32):
    """The parameters as PEFT has them, [E r, K] and [N, r E], and the views of them that are an adapter."""
    a = (torch.randn(EXPERTS * rank, k, device=device) / k**0.5).to(dtype).requires_grad_()
    b = (torch.randn(n, rank * EXPERTS, device=device) / rank**0.5).to(dtype).requires_grad_()
    low = moegemm.lora.LowRank(a.view(EXPERTS, rank, k), b.view(n, rank, EXPERTS).permute(2, 0, 1), SCALING)
    return (a, b), low


def expected_gradients(low, d_w):
    """Of A and B, from the gradient of W [E, N, K]."""
    a, b = low.A.detach().double(), low.B.detach().double()
    return low.scaling * b.transpose(1, 2) @ d_w, low.scaling * d_w @ a.transpose(1, 2)


RANKS = [1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 48, 63, 64, 65, 96, 100, 128, 129, 192, 200, 255, 256]


@pytest.mark.parametrize("rank", RANKS)
def test_any_rank_in_the_layout_of_peft(device, rank):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    limit = 2e-5 if dtype == torch.float32 else SIXTEEN_BIT
    torch.manual_seed(rank)
    layer = make_layer(device, dtype)
    first, gate_up = peft_factors(HIDDEN, 2 * INNER, rank, device)
    second, down = peft_factors(INNER, HIDDEN, rank, device)
    d_out = torch.randn_like(layer.tensors["x"])
    out = run(layer, gate_up, down)
    out.backward(d_out)
    exact = reference_gradients(dense(layer, gate_up, down), d_out)
    assert relative_error(out.detach(), exact["out"]) <= limit
    for parameters, low, name in ((first, gate_up, "w_gate_up"), (second, down, "w_down")):
        d_a, d_b = expected_gradients(low, exact[name])
        assert relative_error(parameters[0].grad.view_as(d_a), d_a) <= limit
        assert relative_error(parameters[1].grad.view(d_b.size(1), rank, EXPERTS).permute(2, 0, 1), d_b) <= limit


def test_gradients_come_in_the_layout_of_their_factor(device):
    """So that torch keeps them as they are: no pass over them follows."""
    layer = make_layer(device, torch.bfloat16)
    _, gate_up = peft_factors(HIDDEN, 2 * INNER, 16, device)
    leaves = [gate_up.A.detach().requires_grad_(), gate_up.B.detach().requires_grad_()]
    out = run(layer, gate_up._replace(A=leaves[0], B=leaves[1]), None)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert [gradient.stride() for gradient in gradients] == [leaf.stride() for leaf in leaves]
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name in ("aten::copy_", "aten::clone", "aten::mul", "aten::_to_copy", "moegemm::joined_factors"):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def test_inference_makes_the_factors_of_both_products_in_one_pass(device):
    layer = make_layer(device, torch.bfloat16)
    lows = [peft_factors(*sizes, 16, device)[1] for sizes in ((HIDDEN, 2 * INNER), (INNER, HIDDEN))]
    with torch.no_grad(), Copies() as copies:
        run(layer, *lows)
    assert copies.seen == ["moegemm::joined_factors"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 80), st.integers(1, 80)),
    order=st.permutations([0, 1, 2]),
    rank_dim=st.sampled_from([1, 2]),
    scaling=st.floats(-4, 4),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 2),
    left_out=st.integers(0, 2**31),
)
def test_factors_are_scaled_and_rounded_once(device, shape, order, rank_dim, scaling, dtypes, left_out):
    memory = torch.randn([shape[dim] for dim in order], device=device).to(dtypes[0])
    factor = memory.permute([order.index(dim) for dim in range(3)])
    generator = torch.Generator().manual_seed(left_out)
    sizes = torch.randint(-1, 3, (shape[0],), generator=generator).int().to(device)
    like = torch.empty(0, dtype=dtypes[1], device=device)
    exact = factor.float() * torch.tensor(scaling, dtype=torch.float32, device=device)
    (joined,) = ops.joined_factors.default([factor], [scaling], [1], [rank_dim], like, sizes)
    used = sizes > 0
    rank = shape[rank_dim]
    assert joined.size(rank_dim) == -(-rank // 8) * 8
    assert torch.equal(joined.narrow(rank_dim, 0, rank)[used], exact.to(dtypes[1])[used])
    assert not joined.narrow(rank_dim, rank, joined.size(rank_dim) - rank)[used].any()
    (back,) = ops.scaled_like.default([exact], [factor], [1.0])
    walked = [dim for dim in range(3) if shape[dim] > 1]
    assert [back.stride(dim) for dim in walked] == [factor.stride(dim) for dim in walked]
    assert torch.equal(back, exact.to(dtypes[0]))


@pytest.mark.parametrize("rank", [1, 5, 8, 16, 33, 64, 256])
@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "in_order"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32_factor", "factor_of_x"])
def test_the_thin_product_of_a_factor_in_place_has_the_bits_of_a_copied_one(device, rank, gathers, dtype, wide):
    if device == "cpu":
        pytest.skip("the CPU copies factors")
    torch.manual_seed(rank)
    experts, topk, tokens, k = 12, 3, 37, 712
    ids = torch.randn(tokens, experts - 2, device=device).topk(topk).indices + 1  # the first and last have no rows
    ids[3, 1], ids[4, 0] = -1, experts
    m_sizes, indices = moegemm.route(ids, experts)
    indices[5] = -1
    x = torch.randn(tokens if gathers else ids.numel(), k, device=device).to(dtype)
    factor = torch.randn(experts, rank, k, device=device).to(torch.float32 if wide else dtype)
    (copied,) = ops.joined_factors.default([factor], [1.0], [1], [1], x, None)
    words = " permute_x" if gathers else ""
    order = (indices, None, topk) if gathers else (None, None, 1)
    exact = ops.forward.default(x, copied, m_sizes, *order, words)
    found = ops.factor_rows.default(x, factor, m_sizes, indices if gathers else None, topk if gathers else 1)
    used = int(m_sizes.sum())
    assert torch.equal(found[:used], exact[:used])


@pytest.mark.parametrize(
    ("pitch", "begin", "rows", "aligned"),
    [(64, 0, 5, True), (72, 8, 5, True), (66, 0, 5, False), (72, 2, 5, False), (66, 0, 1, True), (66, 2, 1, False)],
)
def test_rows_of_tokens_are_read_beside_a_factor_in_place_where_they_are_aligned(device, pitch, begin, rows, aligned):
    layer = make_layer(device, torch.bfloat16, tokens=rows, hidden=64, topk=2)
    wide = torch.zeros(rows * pitch + 8, dtype=torch.bfloat16, device=device)
    x = wide.as_strided((rows, 64), (pitch, 1), begin).copy_(layer.tensors["x"])
    low = moegemm.lora.LowRank(
        torch.randn(EXPERTS, 16, 64, device=device),
        torch.randn(EXPERTS, layer.tensors["w_gate_up"].size(1), 16, device=device),
        SCALING,
    )
    assert _lie_aligned(low.A, x) == aligned
    assert not _lie_aligned(low.A[..., 2:58], x)
    with torch.no_grad():
        expected = run(layer, low, None)
        layer.tensors["x"] = x
        assert torch.equal(run(layer, low, None), expected)


def test_operators_keep_to_their_schemas(device):
    (_, low), (_, other) = (peft_factors(24, 40, rank, device) for rank in (1, 16))  # 17: no multiple of 4 will do
    sizes = torch.ones(EXPERTS, dtype=torch.int32, device=device)
    like = torch.empty(1, dtype=torch.bfloat16, device=device)
    a, b = [low.A.detach(), other.A.detach()], [low.B.detach(), other.B.detach()]
    torch.library.opcheck(ops.joined_factors.default, ([*a, *b], [1.0, 1.0, 2.0, 3.0], [2, 2], [1, 2], like, sizes))
    torch.library.opcheck(ops.scaled_like.default, ([b[0].contiguous(), a[0]], [b[0], a[0]], [2.0, 1.0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda f: ([f], [1.0, 2.0], [1], [1], f, None), "scalings has 2 entries; it must have 1"),
        (lambda f: ([f], [1.0], [1], [0], f, None), r"ranks\[0\] is 0; it must be 1 or 2"),
        (lambda f: ([f], [1.0], [2], [1], f, None), r"counts\[0\] is 2; it must be between 1 and the 1 parts"),
        (lambda f: ([f[0]], [1.0], [1], [1], f, None), "parts is fp32.* it must have 3 dimensions"),
        (lambda f: ([f], [1.0], [1], [1], f, torch.ones(9).int()), "m_sizes is int32.9."),
    ],
)
def test_refusals_name_the_argument(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        ops.joined_factors.default(*arguments(torch.randn(4, 3, 5)))
