"""Products with a bias and an activation: equal to the operators that they join, and refused as clearly."""

import moegemm  # noqa: F401 - registers the operators
import pytest
import torch
from conftest import make_case
from moegemm.operators import flags as bits

OPS = torch.ops.moegemm
SWIGLU = "silu/concatenated"
GPT_OSS = "silu/interleaved alpha=1.702 limit=7 up_offset=1"
GELU = "gelu/none"


def first_product(case, w, bias, activation, flags=bits.PERMUTE_X):
    return OPS.forward_activated(case.X, w, bias, case.m_sizes, case.gather_indices, case.topk, flags, activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS, GELU])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_activated_product_is_the_product_then_the_activation(device, dtype, activation, transposed, biased):
    case = make_case(device, "permute_x", dtype, n=64, k=48, unrouted=3)
    bias = torch.randn(5, 64, device=device).to(dtype) if biased else None
    w = case.W.transpose(1, 2).contiguous() if transposed else case.W
    flags = bits.PERMUTE_X | bits.TRANSPOSED * transposed
    got = first_product(case, w, bias, activation, flags)
    product = OPS.forward(
        case.X, case.W, case.m_sizes, case.gather_indices, None, case.topk, bits.PERMUTE_X | bits.FLOAT32_OUTPUT
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
    plain = OPS.forward(case.X, case.W, case.m_sizes, case.gather_indices, None, case.topk, bits.PERMUTE_Y)
    experts = torch.repeat_interleave(torch.arange(5, device=device), case.m_sizes.long())
    want = plain.clone()
    want[case.gather_indices.long()] += bias[experts]
    if transposed:
        w, flags, weights = case.W.transpose(1, 2).contiguous(), bits.PERMUTE_Y | bits.TRANSPOSED, None
    else:
        w, flags, weights = case.W, bits.PERMUTE_Y | bits.FUSE_MUL, case.topk_weights
        want *= case.topk_weights.reshape(-1, 1)
    got = OPS.forward_biased(case.X, w, bias, case.m_sizes, case.gather_indices, weights, case.topk, flags)
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
    with pytest.raises(RuntimeError, match="activation is 'swish'; accepted are silu, gelu, "):
        first_product(case, case.W, None, "swish/none")
    with pytest.raises(RuntimeError, match="activation"):
        first_product(make_case(device, "permute_y", torch.float32), case.W, None, SWIGLU, bits.PERMUTE_Y)
    case = make_case(device, "permute_y_mul", torch.float32)
    flags = bits.PERMUTE_Y | bits.FUSE_MUL | bits.TRANSPOSED
    arguments = (case.m_sizes, case.gather_indices, case.topk_weights, case.topk, flags)
    with pytest.raises(RuntimeError, match="fuse_mul_post"):
        OPS.forward_biased(case.X, case.W, torch.randn(5, 24, device=device), *arguments)
