"""Products with a bias and an activation: equal to the operators that they join, and refused as clearly."""

import moegemm  # noqa: F401 - registers the operators
import pytest
import torch
from conftest import make_case
from moegemm.operators.options import DY_PER_TOKEN, FLOAT32_OUTPUT, MULTIPLY, PERMUTE_X, PERMUTE_Y, TRANSPOSED

OPS = torch.ops.moegemm
SWIGLU = "silu/concatenated"
GPT_OSS = "silu/interleaved alpha=1.702 limit=7.0 up_offset=1.0"
GELU = "gelu/none"


def first_product(case, w, bias, activation, options=PERMUTE_X):
    routing = (case.m_sizes, case.gather_indices, None, case.topk)
    return OPS.forward(case.X, w, *routing, options, bias=bias, activation=activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, GELU])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_activated_product_is_the_product_then_the_activation(device, dtype, activation, transposed, biased):
    case = make_case(device, "permute_x", dtype, n=64, k=48, unrouted=3)
    bias = torch.randn(5, 64, device=device).to(dtype) if biased else None
    w = case.W.transpose(1, 2).contiguous() if transposed else case.W
    got = first_product(case, w, bias, activation, PERMUTE_X + TRANSPOSED * transposed)
    product = OPS.forward(
        case.X, case.W, case.m_sizes, case.gather_indices, None, case.topk, PERMUTE_X + FLOAT32_OUTPUT
    )
    want = OPS.activate(product, None if bias is None else bias.float(), case.m_sizes, activation)
    # The joined operator may round the product before it activates it.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
    assert torch.all(got[-3:] == 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_biased_product_adds_before_it_scales(device, transposed):
    case = make_case(device, "permute_y_mul", torch.float32)
    bias = torch.randn(5, 24, device=device)
    plain = OPS.forward(case.X, case.W, case.m_sizes, case.gather_indices, None, case.topk, PERMUTE_Y)
    experts = torch.repeat_interleave(torch.arange(5, device=device), case.m_sizes.long())
    want = plain.clone()
    want[case.gather_indices.long()] += bias[experts]
    if transposed:
        w, options, weights = case.W.transpose(1, 2).contiguous(), PERMUTE_Y + TRANSPOSED, None
    else:
        w, options, weights = case.W, PERMUTE_Y + MULTIPLY, case.topk_weights
        want *= case.topk_weights.reshape(-1, 1)
    got = OPS.forward(case.X, w, case.m_sizes, case.gather_indices, weights, case.topk, options, bias=bias)
    torch.testing.assert_close(got, want)


def test_an_index_out_of_range_reads_as_zeros_in_front_of_the_bias(device):
    case = make_case(device, "permute_x", torch.float32)
    case.gather_indices[0] = -1
    bias = torch.randn(5, 24, device=device)
    got = first_product(case, case.W, bias, SWIGLU)
    expert = int((case.m_sizes.cumsum(0) > 0).nonzero()[0])
    gate, up = bias[expert].chunk(2)
    torch.testing.assert_close(got[0], torch.nn.functional.silu(gate) * up)


def test_refusals_name_the_argument(device):
    case = make_case(device, "permute_x", torch.float32, n=25)
    with pytest.raises(RuntimeError, match="even"):
        first_product(case, case.W, None, SWIGLU)
    case = make_case(device, "permute_x", torch.float32)
    with pytest.raises(RuntimeError, match="bias"):
        first_product(case, case.W, torch.randn(5, 23, device=device), SWIGLU)
    with pytest.raises(RuntimeError, match="activation"):
        first_product(make_case(device, "permute_y", torch.float32), case.W, None, SWIGLU, PERMUTE_Y)
    case = make_case(device, "permute_y_mul", torch.float32)
    routing = (case.m_sizes, case.gather_indices, case.topk_weights, case.topk)
    with pytest.raises(RuntimeError, match="fuse_mul_post"):
        OPS.forward(case.X, case.W, *routing, PERMUTE_Y + MULTIPLY + TRANSPOSED)


def test_words_that_mean_nothing_are_refused(device):
    case = make_case(device, "permute_x", torch.float32)
    with pytest.raises(RuntimeError, match=r"options has the word 'permutex'; accepted are permute_x"):
        first_product(case, case.W, None, "", " permutex")
    for text, message in (
        ("tanh/none", "activation is 'tanh'; accepted are silu, gelu"),
        ("silu/rows", "layout is 'rows'; accepted are none, concatenated and interleaved"),
        ("silu", "its form is function/layout"),
        ("silu/none beta=1", "it may have alpha=, limit= and up_offset="),
        ("silu/none limit=high", "limit is 'high'; a number is accepted"),
    ):
        with pytest.raises(RuntimeError, match=message):
            first_product(case, case.W, None, text)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("order", ["", PERMUTE_X, PERMUTE_Y])
def test_a_transposed_layout_gives_the_same_products(device, order, per_token):
    """W and dW as [E, K, N] against [E, N, K], in every order that rows can have."""
    case = make_case(device, "permute_x" if order == PERMUTE_X else "permute_y", torch.float32)
    routing = (case.m_sizes, case.gather_indices, None, case.topk)
    transposed = case.W.transpose(1, 2).contiguous()
    dY = torch.randn(case.rows, 24, device=device)
    options = order
    if per_token and order == PERMUTE_Y:
        dY, options = dY[: case.rows // case.topk], order + DY_PER_TOKEN
    torch.testing.assert_close(
        OPS.forward(case.X, transposed, *routing, order + TRANSPOSED), OPS.forward(case.X, case.W, *routing, order)
    )
    torch.testing.assert_close(
        OPS.dx(dY, transposed, *routing, options + TRANSPOSED), OPS.dx(dY, case.W, *routing, options)
    )
    torch.testing.assert_close(
        OPS.dw(dY, case.X, *routing, options + TRANSPOSED), OPS.dw(dY, case.X, *routing, options).transpose(1, 2)
    )
