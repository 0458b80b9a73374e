"""Operators with packed weights: the bits of dequantised ones, in every format, and what is refused."""

import moegemm  # noqa: F401 - registers the operators
import pytest
import torch
from moegemm.operators.options import PERMUTE_X

OPS = torch.ops.moegemm
E, N, K, M = 5, 48, 128, 40
FORMATS = ("mxfp4", "fp8/128x128", "fp8/channel", "fp8/tensor", "int4/32", "nf4/64")


def packed(w_format: str, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Any values, with scales that keep them small."""
    bytes_ = torch.randint(0, 256, (E, N, K), dtype=torch.uint8)
    scales = torch.rand(E, N, K // 32) * 0.01 + 0.01
    w, s = {
        "mxfp4": (bytes_[..., : K // 2], torch.randint(118, 122, (E, N, K // 32), dtype=torch.uint8)),
        "fp8/128x128": (bytes_ & 0xF6, scales[:, :1, :1]),
        "fp8/channel": (bytes_ & 0xF6, scales[..., :1]),
        "fp8/tensor": (bytes_ & 0xF6, scales[:, 0, 0]),
        "int4/32": (bytes_[..., : K // 2].contiguous().view(torch.int32), scales.bfloat16()),
        "nf4/64": (bytes_[..., : K // 2], torch.rand(E, N * K // 64)),
    }[w_format]
    return w.contiguous().to(device), s.contiguous().to(device)


def routing(device) -> torch.Tensor:
    return torch.tensor([3, 0, 20, 1, 10], dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("w_format", FORMATS)
def test_products_have_the_bits_of_dequantised_weights(device, w_format, dtype):
    torch.manual_seed(1)
    w, scales = packed(w_format, device)
    W = OPS.dequantize(w, scales, w_format, dtype)
    assert (W.shape, W.dtype) == ((E, N, K), dtype)
    assert not W.isnan().any()
    X, dY = (torch.randn(M, width, device=device).to(dtype) for width in (K, N))
    sizes, quantised = routing(device), {"w_scales": scales, "w_format": w_format}
    assert torch.equal(OPS.forward(X, w, sizes, **quantised), OPS.forward(X, W, sizes))
    assert torch.equal(OPS.dx(dY, w, sizes, **quantised), OPS.dx(dY, W, sizes))
    indices = torch.randperm(M, dtype=torch.int32).to(device)
    flat = (X, w, sizes, indices, None, 1, PERMUTE_X, None)
    assert torch.equal(OPS.forward(*flat, **quantised), OPS.forward(flat[0], W, *flat[2:]))
    out = torch.empty(M, N, device=device, dtype=dtype)
    OPS.forward_out(X, w, sizes, None, None, 1, "", None, out, **quantised)
    assert torch.equal(out, OPS.forward(X, W, sizes))
    low = torch.randn(M, 8, device=device).to(dtype), torch.randn(E, N, 8, device=device).to(dtype)
    assert torch.equal(
        OPS.forward_low_rank(X, w, sizes, None, *low, **quantised), OPS.forward_low_rank(X, W, sizes, None, *low)
    )


def test_values_are_those_of_the_formats(device):
    w, scales = packed("int4/32", device)
    q = torch.stack([(w >> (4 * i)) & 15 for i in range(8)], -1).reshape(E, N, K)
    expected = ((q - 8).float() * scales.float().repeat_interleave(32, -1)).bfloat16()
    assert torch.equal(OPS.dequantize(w, scales, "int4/32", torch.bfloat16), expected)
    w, scales = packed("fp8/channel", device)
    expected = (w.view(torch.float8_e4m3fn).float() * scales).half()
    for values in (w, w.view(torch.float8_e4m3fn)):
        assert torch.equal(OPS.dequantize(values, scales, "fp8/channel", torch.float16), expected)
    w, scales = packed("mxfp4", device)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    e2m1 = torch.cat([e2m1, -e2m1])
    nibbles = torch.stack([w & 15, w >> 4], -1).reshape(E, N, K).long()
    expected = e2m1[nibbles] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    for factors in (scales, scales.view(torch.float8_e8m0fnu)):
        assert torch.equal(OPS.dequantize(w, factors, "mxfp4", torch.float32), expected)


def test_odd_columns_of_nf4_come_with_their_shape(device):
    w = torch.randint(0, 256, (2, (5 * 33 + 1) // 2), dtype=torch.uint8, device=device)
    scales = torch.ones(2, 3, device=device)
    W = OPS.dequantize(w, scales, "nf4/64/5x33", torch.float32)
    assert W.shape == (2, 5, 33)
    X, sizes = torch.randn(4, 33, device=device), torch.tensor([3, 1], dtype=torch.int32, device=device)
    assert torch.equal(OPS.forward(X, w, sizes, w_scales=scales, w_format="nf4/64/5x33"), OPS.forward(X, W, sizes))


@pytest.mark.parametrize("w_format", FORMATS)
def test_torch_knows_the_operators(device, w_format):
    w, scales = packed(w_format, device)
    quantised = {"w_scales": scales, "w_format": w_format}
    X, dY = (torch.randn(M, width, device=device).bfloat16() for width in (K, N))
    torch.library.opcheck(OPS.forward.default, (X, w, routing(device)), quantised)
    torch.library.opcheck(OPS.dx.default, (dY, w, routing(device)), quantised)
    torch.library.opcheck(OPS.dequantize.default, (w, scales, w_format, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, s: {"w_scales": None}, "w_scales is None"),
        (lambda w, s: {"w_format": "mxfp3"}, "w_format is 'mxfp3'; accepted are mxfp4"),
        (lambda w, s: {"w_scales": s[..., :2]}, r"w_scales is e8m0\[5, 48, 2\].*must be \[5, 48, 4\]"),
        (lambda w, s: {"w_scales": s.float()}, "w_scales are fp32; accepted are e8m0"),
        (lambda w, s: {"w_scales": s.int()}, "w_scales has dtype Int"),
        (lambda w, s: {"w": w.int()}, "W has dtype Int; accepted with mxfp4 are uint8"),
        (lambda w, s: {"w": w[..., :60]}, r"X is bf16\[40, 128\]"),
        (lambda w, s: {"options": " transposed"}, r"W is quantised \(mxfp4\) as \[E, K, N\]"),
    ],
)
def test_what_does_not_fit_is_refused(device, change, message):
    w, scales = packed("mxfp4", device)
    X = torch.randn(M, K, device=device).bfloat16()
    call = {"x": X, "w": w, "m_sizes": routing(device), "w_scales": scales, "w_format": "mxfp4"} | change(w, scales)
    with pytest.raises(RuntimeError, match=message):
        OPS.forward(**call)


def test_without_memory_refusals_have_the_librarys_words():
    w, scales = (tensor.to("meta") for tensor in packed("mxfp4", "cpu"))
    X, sizes = torch.empty(M, K, device="meta", dtype=torch.bfloat16), routing("cpu").to("meta")
    for values, w_format, message in (
        (w, "mxfp3", "w_format is 'mxfp3'; accepted are mxfp4"),
        (w[0], "mxfp4", r"W has 2 dimensions; its shape must be \[E, N, K / 2\] with mxfp4"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            OPS.forward(X, values, sizes, w_scales=scales, w_format=w_format)


def test_dequantize_calls_its_scales_what_its_caller_does():
    w, scales = packed("mxfp4", "cpu")
    with pytest.raises(RuntimeError, match="] scales are fp32; accepted are e8m0 with mxfp4"):
        OPS.dequantize(w, scales.float(), "mxfp4", torch.bfloat16)
