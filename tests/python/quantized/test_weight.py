"""moegemm.QuantizedWeight: what it is made from, what it means, and that it goes where weights go."""

import copy
import io
import pickle

import moegemm
import pytest
import torch
from quantized_reference import WORDS, dequantised, random_weight

E, N, K = 3, 40, 256
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def made(word: str, device: str = "cpu", n: int = N, k: int = K) -> moegemm.QuantizedWeight:
    values, scales = random_weight(word, E, n, k)
    return moegemm.QuantizedWeight(values.to(device), scales.to(device), word)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("word", WORDS)
def test_it_means_what_the_format_says(device, word, dtype):
    w = made(word, device)
    expected = dequantised(w.values.cpu(), w.scales.cpu(), word, dtype)
    got = w.dequantize(dtype)
    assert got.device.type == device
    assert torch.equal(got.cpu(), expected)
    assert tuple(w.shape) == (E, N, K)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize(
    ("word", "n", "k"), [("fp8/128x128", 200, 136), ("fp8/channel", 17, 48), ("fp8/tensor", 5, 16)]
)
def test_fp8_takes_scales_of_every_dtype_and_partial_blocks(device, scales, word, n, k):
    values, factors = random_weight(word, E, n, k, scale_dtype=scales)
    w = moegemm.QuantizedWeight(values.to(device), factors.to(device), word)
    assert torch.equal(w.dequantize().cpu(), dequantised(values, factors, word, torch.bfloat16))


def test_every_value_and_scale_of_mxfp4_is_exact(device):
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 16).view(1, 256, 4096)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 256)
    for dtype in (torch.bfloat16, torch.float32):
        w = moegemm.QuantizedWeight.from_mxfp4(values.to(device), scales.to(device))
        expected = dequantised(values, scales, "mxfp4", dtype)
        assert torch.equal(w.dequantize(dtype).cpu().nan_to_num(7e7), expected.nan_to_num(7e7))


def test_mxfp4_takes_blocks_as_gpt_oss_has_them():
    values, scales = random_weight("mxfp4", E, N, K)
    four = moegemm.QuantizedWeight.from_mxfp4(values.view(E, N, K // 32, 16), scales)
    assert torch.equal(four.values, values)
    assert four.values.data_ptr() == values.data_ptr()
    of_e8m0 = moegemm.QuantizedWeight.from_mxfp4(values.view(torch.int8), scales.view(torch.float8_e8m0fnu))
    assert torch.equal(of_e8m0.dequantize(), four.dequantize())


@pytest.mark.parametrize("shape", [(), (1,), (E,), (E, 1, 1)])
def test_fp8_takes_one_scale_or_one_for_each_expert(shape):
    values, _ = random_weight("fp8/tensor", E, N, K)
    scales = torch.rand(shape)
    w = moegemm.QuantizedWeight.from_fp8(values, scales, block=None)
    assert w.word == "fp8/tensor"
    assert torch.equal(w.scales, scales.reshape(-1).expand(E))


def test_fp8_takes_a_scale_for_each_channel():
    values, scales = random_weight("fp8/channel", E, N, K)
    for given in (scales, scales.unsqueeze(-1)):
        w = moegemm.QuantizedWeight.from_fp8(values, given, block=None)
        assert w.word == "fp8/channel"
        assert torch.equal(w.scales, scales)


REFUSED = {
    "blocks has dtype": lambda q: q.from_mxfp4(torch.zeros(2, 4, 16), torch.zeros(2, 4, 1, dtype=torch.uint8)),
    "K is 48; it must be a multiple of 32": lambda q: q.from_mxfp4(
        torch.zeros(2, 4, 24, dtype=torch.uint8), torch.zeros(2, 4, 1, dtype=torch.uint8)
    ),
    r"scales is \[2, 4, 2\]; its shape must be \[E, N, K / 32\] = \[2, 4, 1\]": lambda q: q.from_mxfp4(
        torch.zeros(2, 4, 16, dtype=torch.uint8), torch.zeros(2, 4, 2, dtype=torch.uint8)
    ),
    "values has dtype torch.uint8": lambda q: q.from_fp8(torch.zeros(2, 4, 16, dtype=torch.uint8), torch.ones(2)),
    r"block is \(64, 64\)": lambda q: q.from_fp8(
        torch.zeros(2, 4, 16).to(torch.float8_e4m3fn), torch.ones(2, 1, 1), block=(64, 64)
    ),
    "block is 5; ": lambda q: q.from_fp8(torch.zeros(2, 4, 16).to(torch.float8_e4m3fn), torch.ones(2, 1, 1), block=5),
    r"scales is \[2, 3\]": lambda q: q.from_fp8(
        torch.zeros(2, 4, 16).to(torch.float8_e4m3fn), torch.ones(2, 3), block=None
    ),
    "group is 48": lambda q: q.from_int4(
        torch.zeros(2, 4, 8, dtype=torch.int32), torch.zeros(2, 4, 1).bfloat16(), group=48
    ),
    "scales has dtype torch.float32": lambda q: q.from_int4(
        torch.zeros(2, 4, 8, dtype=torch.int32), torch.zeros(2, 4, 2)
    ),
    "K is 64; it must be a multiple of the group, 128": lambda q: q.from_int4(
        torch.zeros(2, 4, 8, dtype=torch.int32), torch.zeros(2, 4, 1).bfloat16(), group=128
    ),
    "has 64 bytes|with 60 bytes": lambda q: q.from_nf4(torch.zeros(60, dtype=torch.uint8), torch.ones(2), (2, 4, 16)),
    "blocksize is 48": lambda q: q.from_nf4(
        torch.zeros(64, dtype=torch.uint8), torch.ones(2), (2, 4, 16), blocksize=48
    ),
    "absmax is": lambda q: q.from_nf4(torch.zeros(64, dtype=torch.uint8), torch.ones(3), (2, 4, 16)),
    r"shape is \(2, 4\)": lambda q: q.from_nf4(torch.zeros(20, dtype=torch.uint8), torch.ones(2), (2, 4)),
    "shape is 5; three numbers": lambda q: q.from_nf4(torch.zeros(20, dtype=torch.uint8), torch.ones(2), 5),
    r"nested is \(tensor": lambda q: nested_nf4(q, torch.ones(2)),
    r"nested\[1\] is \[16\]; a code of 256": lambda q: nested_nf4(q, torch.ones(2), torch.ones(16), 0.0),
    r"nested\[3\] is 0; a positive": lambda q: nested_nf4(q, torch.ones(2), torch.ones(256), 0.0, 0),
    r"nested\[2\] has 3 numbers": lambda q: nested_nf4(q, torch.ones(2, 1), torch.ones(256), torch.ones(3)),
    r"nested\[0\] is \[3\] with across_experts=None; its shape must be \[1\] across": lambda q: nested_nf4(
        q, torch.ones(3), torch.ones(256), 0.0
    ),
    r"shape is \(2, 5, 20\) with blocks across the experts; N \* K must be a multiple of the blocksize, 64": lambda q: (
        q.from_nf4(torch.zeros(100, dtype=torch.uint8), torch.ones(4), (2, 5, 20), across_experts=True)
    ),
    r"shape is \(2, 5, 20\) with blocks across": lambda q: q.from_nf4(  # four codes in one block tell the same
        torch.zeros(100, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.uint8),
        (2, 5, 20),
        nested=(torch.ones(1), torch.ones(256), 0.0),
    ),
}


def nested_nf4(q, *nested):
    packed, codes = torch.zeros(64, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    return q.from_nf4(packed, codes, (2, 4, 16), nested=nested)


@pytest.mark.parametrize("words", REFUSED)
def test_bad_tensors_are_refused_with_argument_value_and_rule(words):
    with pytest.raises((TypeError, ValueError), match=words):
        REFUSED[words](moegemm.QuantizedWeight)


@pytest.mark.parametrize(
    ("w", "words", "arguments"),
    [
        (torch.zeros(4, 32), r"w is \[4, 32\]", {"format": "mxfp4"}),
        (torch.zeros(1, 4, 40), "multiple of the group, 32", {"format": "mxfp4"}),
        (torch.zeros(1, 4, 40).double(), "torch.float64", {"format": "mxfp4"}),
        (torch.zeros(1, 4, 32), "format is 'int8'", {"format": "int8"}),
        (torch.zeros(1, 4, 32), "rounding is 'up'", {"format": "mxfp4", "rounding": "up"}),
        (torch.zeros(1, 4, 32), "scale_dtype is torch.float32", {"format": "int4", "scale_dtype": torch.float32}),
        (torch.zeros(1, 4, 32), "block is", {"format": "fp8", "block": "row"}),
        (torch.zeros(1, 4, 32), r"block is None; \(128, 128\), 'channel' and", {"format": "fp8", "block": None}),
        (torch.zeros(1, 4, 32), "block is 128; ", {"format": "fp8", "block": 128}),
        (torch.zeros(1, 4, 32), "group is 0; accepted are 32, 64, 128", {"format": "int4", "group": 0}),
        (torch.zeros(1, 4, 32), "group is '32'; accepted", {"format": "int4", "group": "32"}),
        (torch.zeros(1, 4, 32), "blocksize is 0; accepted are 32, 64", {"format": "nf4", "blocksize": 0}),
        (
            torch.zeros(1, 4, 32),
            "group is 64 with format 'fp8'; it is an option of int4",
            {"format": "fp8", "group": 64},
        ),
        (torch.zeros(1, 4, 32), "blocksize is 128 with format 'int4'", {"format": "int4", "blocksize": 128}),
        (torch.zeros(1, 4, 32), "block is 'channel' with format 'nf4'", {"format": "nf4", "block": "channel"}),
        (torch.zeros(1, 4, 32), "rounding is 'ceil' with format 'fp8'", {"format": "fp8", "rounding": "ceil"}),
        (torch.zeros(1, 4, 32), "scale_dtype is .* of fp8 and int4", {"format": "mxfp4", "scale_dtype": torch.float32}),
        (torch.zeros(1, 4, 32), "format is None", {"format": None}),
    ],
)
def test_quantize_refuses_with_argument_value_and_rule(w, words, arguments):
    with pytest.raises((TypeError, ValueError), match=words):
        moegemm.quantize(w, **arguments)


FP8_SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]


@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-37, 2e-6, 1e-3, 3e7, 1e9, 1e38])
@pytest.mark.parametrize("scales", FP8_SCALES)
@pytest.mark.parametrize("block", [(128, 128), "channel", "tensor"])
def test_fp8_scales_are_finite_however_small_or_large_weights_are(device, block, scales, size):
    if scales == torch.float8_e8m0fnu and block != (128, 128):
        pytest.skip("e8m0 scales are those of blocks")
    w = torch.zeros(2, 128, 128, device=device)
    w[0, 0, :64], w[1] = size, torch.rand(128, 128) * size
    made = moegemm.quantize(w, "fp8", block=block, scale_dtype=scales)
    assert torch.isfinite(made.scales.view(scales).float()).all()
    got = made.dequantize(torch.float32)
    assert torch.isfinite(got).all()
    assert not got[0, 1:].any()
    if 1e-5 < size < 1e7:
        assert ((got - w).norm() / w.norm()).item() < 0.04


@pytest.mark.parametrize("size", [1e-6, 2e-5])
@pytest.mark.parametrize(("format", "options"), [("fp8", {}), ("fp8", {"block": "channel"}), ("int4", {})])
def test_subnormal_scales_cut_no_value(format, options, size):
    w = torch.full((1, 128, 128), size)
    got = moegemm.quantize(w, format, scale_dtype=torch.float16, **options).dequantize(torch.float32)
    assert ((got - w).norm() / w.norm()).item() < 0.1


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "int4", "nf4"])
def test_quantized_weights_are_close_to_what_they_were_made_of(device, format):
    w = torch.randn(4, 64, 256, device=device).bfloat16()
    error = (moegemm.quantize(w, format).dequantize().float() - w.float()).norm() / w.float().norm()
    assert error < {"mxfp4": 0.15, "fp8": 0.03, "int4": 0.12, "nf4": 0.11}[format]


def test_a_chunk_of_experts_at_a_time_makes_the_same_bytes(monkeypatch):
    from moegemm.quantized import rounding

    w = torch.randn(5, 8, 256)
    whole = {f: moegemm.quantize(w, f) for f in ("mxfp4", "fp8", "int4", "nf4")}
    monkeypatch.setattr(rounding, "CHUNK", 2 * 8 * 256)
    for format, expected in whole.items():
        got = moegemm.quantize(w, format)
        assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))


class Layer(torch.nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        self.norm = torch.nn.Linear(4, 4)
        self.w = made(word)


def same(a: moegemm.QuantizedWeight, b: moegemm.QuantizedWeight) -> bool:
    pairs = ((a.values, b.values), (a.scales, b.scales))
    return a.word == b.word and all(
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs
    )


@pytest.mark.parametrize("word", WORDS)
def test_a_module_keeps_it_in_its_state(word, tmp_path):
    layer, other = Layer(word), Layer(word)
    torch.nn.init.zeros_(other.w.values.view(torch.uint8)) if word != "fp8" else None
    assert {"w.values", "w.scales"} <= set(layer.state_dict())
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    assert same(layer.w, other.w)
    on_meta = Layer(word).to("meta")
    assert on_meta.w.device.type == "meta"
    on_meta.load_state_dict(layer.state_dict(), assign=True)
    assert same(on_meta.w, layer.w)


def test_tensors_of_another_format_are_not_loaded():
    values = torch.randn(2, 128, 128).to(torch.float8_e4m3fn)
    fp8 = moegemm.QuantizedWeight.from_fp8(values, torch.full((2, 1, 1), 0.5))
    e8m0 = moegemm.QuantizedWeight.from_fp8(values, torch.full((2, 1, 1), 0.5).to(torch.float8_e8m0fnu))
    before = copy.deepcopy(fp8)
    with pytest.raises(
        RuntimeError, match=r"scales has dtype torch.uint8; torch.float32 is accepted .* in fp8/128x128"
    ):
        fp8.load_state_dict(e8m0.state_dict())
    bytes_of_four_bits = {"values": torch.ones(2, 128, 128, dtype=torch.uint8), "scales": torch.ones(2, 1, 1)}
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"values has dtype torch.uint8; torch.float8_e4m3fn is accepted"):
            fp8.load_state_dict(bytes_of_four_bits, assign=assign)
    halves = made("int4/32")
    with pytest.raises(RuntimeError, match=r"scales has dtype torch.float16; torch.bfloat16"):
        halves.load_state_dict({"values": halves.values, "scales": halves.scales.half()})
    assert same(fp8, before)


@pytest.mark.parametrize("word", WORDS)
def test_it_pickles_and_copies(word):
    w = made(word)
    buffer = io.BytesIO()
    torch.save(w, buffer)
    buffer.seek(0)
    for again in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w), torch.load(buffer, weights_only=False)):
        assert same(w, again)
        assert again.values.data_ptr() != w.values.data_ptr()


@pytest.mark.parametrize("word", WORDS)
def test_a_change_of_dtype_leaves_it_alone_and_a_device_does_not(device, word):
    layer = Layer(word)
    expected = copy.deepcopy(layer.w)
    for change in (
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.to(device, torch.float16),
    ):
        change(layer)
        assert same(layer.w.to("cpu") if device == "cpu" else copy.deepcopy(layer.w).cpu(), expected)
    assert layer.norm.weight.dtype == torch.float16
    assert layer.w.device.type == device
    assert layer.to_empty(device="meta").w.device.type == "meta"


def test_it_is_dequantised_to_floating_formats_only():
    with pytest.raises(
        TypeError, match=r"dtype is torch.int8; accepted are torch.bfloat16, torch.float16, torch.float32"
    ):
        made("mxfp4").dequantize(torch.int8)


def test_its_parameters_never_require_gradients():
    w = made("mxfp4")
    assert not any(p.requires_grad for p in w.parameters())
    with pytest.raises(TypeError, match="a quantised weight is frozen"):
        w.requires_grad_()
    assert w.requires_grad_(False) is w


def test_its_repr_says_what_it_is():
    assert (
        repr(made("int4/64")) == f"QuantizedWeight(int4/64, experts=3, out=40, in=256, {3 * 40 * (128 + 8)} bytes, cpu)"
    )
    assert made("mxfp4").nbytes == 3 * 40 * (128 + 8)
