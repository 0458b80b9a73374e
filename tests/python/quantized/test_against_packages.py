"""moegemm.quantize makes the bytes that each format's own package makes (requirements/quantized.txt)."""

import moegemm
import pytest
import torch
from quantized_reference import dequantised

transformers_fp8 = "transformers.integrations.finegrained_fp8"


def weights(dtype: torch.dtype, n: int = 40, k: int = 256) -> torch.Tensor:
    """Rows of very different sizes, zeros, and values that lie in the middle of two."""
    w = torch.randn(3, n, k) * torch.logspace(-3, 1, n).view(1, n, 1)
    w[0, 0], w[1, :, :32] = 0, 0
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    w[2, 3, :64] = middles[torch.arange(64) % 8] * (-1.0) ** torch.arange(64)
    w[2, 4, :32], w[2, 5, 0] = 4.0, -1e-20
    return w.to(dtype)


def with_infinities(w: torch.Tensor) -> torch.Tensor:
    """And with a group whose values are below what 6 divides in fp32."""
    w[0, 1, 3], w[0, 2, 40], w[0, 3, :32] = float("inf"), -float("inf"), 0
    w[0, 3, 5] = torch.finfo(torch.float32).tiny * torch.finfo(torch.float32).eps * 3
    return w


def assert_same_bytes(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rounding", "mode"), [("floor", "FLOOR"), ("ceil", "RCEIL")])
def test_mxfp4_is_that_of_torchao(dtype, rounding, mode):
    mx = pytest.importorskip(
        "torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed", exc_type=ImportError
    )
    w = with_infinities(weights(dtype))
    scales, values = mx.to_mx(w, torch.float4_e2m1fn_x2, 32, getattr(mx.ScaleCalculationMode, mode))
    made = moegemm.quantize(w, "mxfp4", rounding=rounding)
    assert_same_bytes(made.values, values.view(torch.uint8))
    assert_same_bytes(made.scales, scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [256, 33])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
def test_nf4_is_that_of_bitsandbytes(dtype, blocksize, k):
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed", exc_type=ImportError)
    w = weights(dtype)[:, :, :k].contiguous()
    w = w[:, :39] if k == 33 else w  # an odd number of values
    made = moegemm.quantize(w, "nf4", blocksize=blocksize)
    for expert in range(w.size(0)):
        packed, state = bnb.quantize_4bit(w[expert], blocksize=blocksize, quant_type="nf4")
        assert_same_bytes(made.values[expert].flatten(), packed.flatten())
        assert torch.equal(made.scales[expert], state.absmax)
        assert torch.equal(made.dequantize(dtype)[expert], bnb.dequantize_4bit(packed, state))


def test_nested_absmax_is_expanded_as_bitsandbytes_does():
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed", exc_type=ImportError)
    w = weights(torch.bfloat16)
    made = [bnb.quantize_4bit(e, blocksize=64, quant_type="nf4", compress_statistics=True) for e in w]
    packed, states = torch.stack([p for p, _ in made]), [s for _, s in made]
    nested = (
        torch.stack([s.state2.absmax for s in states]), states[0].state2.code, torch.stack([s.offset for s in states]),
    )  # fmt: skip
    codes = torch.stack([s.absmax for s in states])
    weight = moegemm.QuantizedWeight.from_nf4(packed, codes, tuple(w.shape), 64, nested)
    for expert, (p, state) in enumerate(made):
        assert torch.equal(weight.dequantize()[expert], bnb.dequantize_4bit(p, state))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("n", [135, 48])  # blocks of nested absmax that straddle two experts, and too few for one
def test_a_stack_that_bitsandbytes_quantised_whole_is_read(n, nested):
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed", exc_type=ImportError)
    # bitsandbytes 0.50.2 itself misreads rows on the CPU that are not whole blocks.
    w = (torch.randn(4, n, 128) * torch.logspace(-1, 1, 4).view(4, 1, 1)).bfloat16()
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=nested)
    second = (state.state2.absmax, state.state2.code, state.offset, state.state2.blocksize) if nested else None
    weight = moegemm.QuantizedWeight.from_nf4(packed, state.absmax, tuple(w.shape), 64, second)
    assert torch.equal(weight.dequantize(), bnb.dequantize_4bit(packed, state))


def test_nested_absmax_that_may_mean_two_things_needs_a_word():
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed", exc_type=ImportError)
    w = (torch.randn(2, 100, 128) * torch.tensor([0.1, 10.0]).view(2, 1, 1)).bfloat16()  # 200 blocks for each expert
    packed, state = bnb.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True)
    arguments = (packed, state.absmax, tuple(w.shape), 64)
    nested = (state.state2.absmax, state.state2.code, state.offset)
    with pytest.raises(ValueError, match=r"nested\[0\] is \[2\], which may be .* or across_experts"):
        moegemm.QuantizedWeight.from_nf4(*arguments, nested)
    whole = moegemm.QuantizedWeight.from_nf4(*arguments, nested, across_experts=True)
    assert torch.equal(whole.dequantize(), bnb.dequantize_4bit(packed, state))
    apart = moegemm.QuantizedWeight.from_nf4(*arguments, nested, across_experts=False)
    in_two_dimensions = (nested[0].view(2, 1), *nested[1:])
    assert torch.equal(moegemm.QuantizedWeight.from_nf4(*arguments, in_two_dimensions).scales, apart.scales)
    assert not torch.equal(apart.scales, whole.scales)


def compressed_tensors(**arguments):
    reason = "compressed-tensors is not installed"
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=reason, exc_type=ImportError)
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers", reason=reason)
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward", reason=reason)
    return quantization.QuantizationArgs(symmetric=True, **arguments), helpers.calculate_qparams, forward.quantize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_that_of_compressed_tensors(dtype, group):
    args, calculate, quantize = compressed_tensors(num_bits=4, type="int", strategy="group", group_size=group)
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    w = weights(dtype)
    made = moegemm.quantize(w, "int4", group=group)
    for expert in range(w.size(0)):
        groups = w[expert].unflatten(-1, (-1, group))
        scales, _ = calculate(groups.amin(-1), groups.amax(-1), args)
        values = quantize(w[expert], scales, None, args, dtype=torch.int8)
        assert_same_bytes(made.values[expert], pack_to_int32(values, 4))
        assert_same_bytes(made.scales[expert], scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", ["channel", "tensor"])
def test_fp8_without_blocks_is_that_of_compressed_tensors(dtype, block):
    args, calculate, quantize = compressed_tensors(num_bits=8, type="float", strategy=block)
    w = weights(dtype)
    made = moegemm.quantize(w, "fp8", block=block)
    for expert in range(w.size(0)):
        of_rows = w[expert] if block == "channel" else w[expert].flatten()
        scales, _ = calculate(of_rows.amin(-1, keepdim=True), of_rows.amax(-1, keepdim=True), args)
        values = quantize(w[expert], scales, None, args, dtype=torch.float8_e4m3fn)
        assert_same_bytes(made.values[expert], values)
        assert_same_bytes(made.scales[expert].flatten(), scales.flatten())


@pytest.mark.parametrize(("scale_fmt", "dtype"), [("float", None), ("ue8m0", torch.float8_e8m0fnu)])
def test_fp8_in_blocks_is_that_of_transformers(scale_fmt, dtype):
    fp8 = pytest.importorskip(transformers_fp8, reason="transformers is not installed", exc_type=ImportError)
    if scale_fmt == "ue8m0" and not hasattr(fp8, "_get_ue8m0_dtype"):
        pytest.skip("this transformers has no ue8m0 scales")

    class Quantizer:
        quantization_config = type("Config", (), {"weight_block_size": (128, 128), "scale_fmt": scale_fmt})

    w = weights(torch.bfloat16, n=256)
    w[0, :128, :128] = 0
    if scale_fmt == "ue8m0":
        w[1, :128, :128] = 1e-37  # with fp32 scales transformers has NaN for the zeros of such a block
    expected = fp8.Fp8Quantize(Quantizer).convert({"experts.weight": w})
    made = moegemm.quantize(w, "fp8", scale_dtype=dtype)
    assert_same_bytes(made.values, expected["experts.weight"])
    assert torch.equal(made.scales.view(torch.uint8), expected["experts.weight_scale_inv"].view(torch.uint8))


def test_mxfp4_is_dequantised_as_transformers_does():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    weight = moegemm.quantize(weights(torch.bfloat16), "mxfp4")
    blocks = weight.values.unflatten(-1, (-1, 16))
    expected = mxfp4.convert_moe_packed_tensors(blocks, weight.scales).transpose(1, 2)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(dequantised(weight.values, weight.scales, weight.word, torch.bfloat16), expected)
