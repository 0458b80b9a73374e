"""moegemm.quantize: weights in 16 or 32 bits to a quantised format, rounded as the format's reference does.

| format | scale | value | reference |
|---|---|---|---|
| mxfp4 | the power of two at or below the largest of 32, over 4 | nearest, ties to even | OCP Microscaling (torchao) |
| fp8, blocks | largest / 448 in fp32 | nearest e4m3 of w * (448 / largest) | transformers |
| fp8, channel or tensor | largest / 448 in w's dtype | nearest e4m3 of w / scale | compressed-tensors |
| int4 | largest / 7.5 in w's dtype | nearest integer of w / scale, -8 to 7 | compressed-tensors |
| nf4 | largest of a block, fp32 | nearest entry of the table, of w * (1 / largest) | bitsandbytes |
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moegemm.formats import FORMATS
from moegemm.operators.errors import shown
from moegemm.operators.rules import require_dtype, require_tensor
from moegemm.quantized.weight import (
    FLOAT_SCALES,
    FP8_BLOCK,
    FP8_SCALES,
    INT4_GROUPS,
    INT4_SCALES,
    MX_GROUP,
    NF4_BLOCKS,
    QuantizedWeight,
    is_fp8_block,
    require_one_of,
)

FP8_LARGEST = 448.0
E2M1_LARGEST_EXPONENT = 2  # of 4, the largest power of two
E2M1_LARGEST = 6.0
INT4_HALF_RANGE = 7.5  # -8 to 7
# Between which values of e2m1 a magnitude lies, and whether the middle itself goes up: ties to the even mantissa.
E2M1_STEPS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
# The quantiles of a normal distribution that QLoRA (arXiv 2305.14314) defines, as bitsandbytes has them.
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)
CHUNK = 1 << 25  # elements that are worked on at a time: what is made on the way takes some 500 MB at most


def _chunks(w: Tensor) -> Iterator[Tensor]:
    """Some experts at a time."""
    step = max(1, CHUNK // max(1, w[:1].numel()))
    for first in range(0, w.size(0), step):
        yield w[first : first + step]


def _in_chunks(w: Tensor, make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    made = [make(chunk) for chunk in _chunks(w)] or [make(w)]
    return torch.cat([values for values, _ in made]), torch.cat([scales for _, scales in made])


def _in_groups(w: Tensor, size: int) -> Tensor:
    """The last dimension as two."""
    return w.reshape(*w.shape[:-1], w.size(-1) // size, size)


def _nibbles(codes: Tensor, high_first: bool) -> Tensor:
    """Two to a byte."""
    first, second = codes[..., 0::2], codes[..., 1::2]
    return (first << 4) | second if high_first else first | (second << 4)


def _mxfp4(w: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    blocks = _in_groups(w.float(), MX_GROUP)
    largest = blocks.abs().amax(-1)
    if rounding == "floor":
        # The exponent as fp32 stores it, with e8m0's own bias.
        biased = (largest.view(torch.int32) >> 23) - E2M1_LARGEST_EXPONENT
    else:
        least = largest / E2M1_LARGEST
        mantissa, exponent = torch.frexp(least)  # [0.5, 1) * 2^exponent; of 0 and of infinity the exponent is 0
        biased = exponent - (mantissa == 0.5).int() + 127
        biased = torch.where(least == 0, 0, torch.where(torch.isinf(least), 254, biased))
    biased = biased.clamp(0, 254)
    # In two steps: 2^127 over 2^-127 is no fp32 number.
    half = (127 - biased) // 2
    scaled = torch.ldexp(torch.ldexp(blocks, half.unsqueeze(-1)), (127 - biased - half).unsqueeze(-1))
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for middle, goes_up in E2M1_STEPS:
        codes += magnitude >= middle if goes_up else magnitude > middle
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    scales = torch.where(largest.isnan(), 255, biased).to(torch.uint8)
    return _nibbles(codes.flatten(-2), high_first=False), scales


def _to_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def _blocks_of(w: Tensor, block: tuple[int, int]) -> Tensor:
    """[E, rows, block_n, columns, block_k] in fp32, zeros where the last block is partial."""
    n, k = w.size(1), w.size(2)
    padded = torch.nn.functional.pad(w.float(), (0, -k % block[1], 0, -n % block[0]))
    experts, rows, columns = padded.shape
    return padded.reshape(experts, rows // block[0], block[0], columns // block[1], block[1])


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 scales in a dtype of fewer numbers: the smallest or the largest where it has none, and upwards where it has
    few, so that no value is cut."""
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * (limits.eps if dtype == torch.float16 else 1.0)  # 1 / those of bf16 is infinite
    scales = torch.where(scales < limits.smallest_normal, (scales / smallest).ceil() * smallest, scales)
    return torch.where(torch.isfinite(scales), scales.clamp(smallest, limits.max), scales).to(dtype)


def _fp8_blocks(w: Tensor, block: tuple[int, int], scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    blocks = _blocks_of(w, block)
    largest = blocks.abs().amax((2, 4))
    factor = torch.where(largest > 0, FP8_LARGEST / largest, 1.0)
    vanishing = torch.isinf(factor)
    if scale_dtype == torch.float32:  # transformers would make NaN of the zeros among them
        factor = torch.where(vanishing, 1.0, factor)
    scales = 1.0 / factor
    if scale_dtype == torch.float8_e8m0fnu:
        tiny = torch.finfo(torch.float32).tiny
        scales = torch.exp2(torch.ceil(torch.log2(scales.clamp(min=tiny))))
    stored = _stored(scales, scale_dtype) if scale_dtype in _NARROW else scales.to(scale_dtype)
    factor = 1.0 / stored.float() if scale_dtype != torch.float32 else torch.where(vanishing, 0.0, factor)
    values = _to_e4m3(blocks * factor[:, :, None, :, None]).flatten(3).flatten(1, 2)
    return values[:, : w.size(1), : w.size(2)].contiguous(), stored


def _symmetric_scale(largest: Tensor, half_range: float, scale_dtype: torch.dtype) -> Tensor:
    """largest / half_range in its own dtype; that of zeros is the dtype's epsilon, as compressed-tensors has it."""
    eps = torch.finfo(scale_dtype).eps
    if scale_dtype != largest.dtype:
        return torch.where(largest == 0, eps, _stored(largest.float() / half_range, scale_dtype))
    scale = largest / half_range
    return torch.where(scale == 0, eps, scale)


def _fp8_channels(w: Tensor, scale_dtype: torch.dtype, whole: bool) -> tuple[Tensor, Tensor]:
    largest = w.abs().amax((1, 2) if whole else 2, keepdim=True)
    scale = _symmetric_scale(largest, FP8_LARGEST, scale_dtype)
    return _to_e4m3(w / scale), scale.flatten() if whole else scale.squeeze(2)


def _int4(w: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    groups = _in_groups(w, group)
    scale = _symmetric_scale(groups.abs().amax(-1), INT4_HALF_RANGE, scale_dtype)
    stored = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7).flatten(-2).to(torch.int32) + 8
    eights = _in_groups(stored, 8)
    packed = eights[..., 0]
    for place in range(1, 8):
        packed = packed | (eights[..., place] << (4 * place))
    return packed, scale


def _nf4(w: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    flat = w.float().flatten(1)
    padded = _in_groups(torch.nn.functional.pad(flat, (0, -flat.size(1) % blocksize)), blocksize)
    absmax = padded.abs().amax(-1)
    scaled = (padded * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1)
    table = torch.tensor(NF4_TABLE, device=w.device)
    middles = (table[:-1] + table[1:]) / 2
    count = flat.size(1) + flat.size(1) % 2  # whole bytes; what fills the last one is a zero
    scaled = torch.nn.functional.pad(scaled.flatten(1)[:, : flat.size(1)], (0, count - flat.size(1)))
    codes = torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)
    return _nibbles(codes, high_first=True), absmax


def _require_multiple(w: Tensor, group: int, what: str) -> None:
    if w.size(2) % group:
        raise ValueError(f"w is {list(w.shape)}; its last dimension K must be a multiple of {what}, {group}")


def _default_scale(w: Tensor, scale_dtype: torch.dtype | None, accepted: tuple[torch.dtype, ...]) -> torch.dtype:
    chosen = scale_dtype or (w.dtype if w.dtype in accepted else accepted[0])
    if chosen not in accepted:
        raise TypeError(f"scale_dtype is {chosen}; accepted are {', '.join(map(str, accepted))}")
    return chosen


_DEFAULTS = {
    "block": ("fp8", FP8_BLOCK),
    "group": ("int4", 32),
    "blocksize": ("nf4", 64),
    "rounding": ("mxfp4", "floor"),
}


def _require_own_options(format: str, scale_dtype: torch.dtype | None, **given: object) -> None:
    """Refuses an option that another format has: it would mean nothing."""
    for name, value in given.items():
        owner, default = _DEFAULTS[name]
        if format != owner and value != default:
            raise ValueError(f"{name} is {shown(value)} with format {shown(format)}; it is an option of {owner}")
    if scale_dtype is not None and format in ("mxfp4", "nf4"):
        raise ValueError(f"scale_dtype is {scale_dtype} with format {shown(format)}; it is an option of fp8 and int4")


def quantize(
    w: Tensor,
    format: str,
    *,
    block: tuple[int, int] | str = FP8_BLOCK,
    group: int = 32,
    blocksize: int = 64,
    rounding: str = "floor",
    scale_dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """Expert weights w [E, N, K] in bf16, fp16 or fp32 as a QuantizedWeight, on the device where they are.

    format is "mxfp4", "fp8", "int4" or "nf4". Of fp8, block is (128, 128), "channel" (one scale for each row of an
    expert) or "tensor" (one for each expert). group is int4's (32, 64 or 128), blocksize nf4's (32 to 4096). rounding
    is that of mxfp4's scales: "floor" as the standard has it, where the largest of a group may be cut to 6 times the
    scale, or "ceil", where none is. scale_dtype: fp8 fp32, bf16, fp16 or float8_e8m0fnu (the latter with blocks), int4
    bf16 or fp16; w's dtype unless given, fp32 for fp8 in blocks.

    >>> import torch, moegemm
    >>> w = torch.randn(4, 8, 64, dtype=torch.bfloat16)
    >>> moegemm.quantize(w, "int4", group=64).nbytes, w.nbytes
    (1088, 4096)
    """
    require_tensor("w", w)
    if w.dim() != 3:
        raise ValueError(f"w is {list(w.shape)}; its shape must be [E, N, K]")
    require_dtype("w", w, tuple(FORMATS))
    _require_own_options(format, scale_dtype, block=block, group=group, blocksize=blocksize, rounding=rounding)
    with torch.no_grad():
        return _quantized(w, format, block, group, blocksize, rounding, scale_dtype)


def _quantized(
    w: Tensor, format: str, block: tuple[int, int] | str, group: int, blocksize: int, rounding: str,
    scale_dtype: torch.dtype | None,
) -> QuantizedWeight:  # fmt: skip
    if format == "mxfp4":
        if rounding not in ("floor", "ceil"):
            raise ValueError(f"rounding is {shown(rounding)}; 'floor' and 'ceil' are accepted")
        _require_multiple(w, MX_GROUP, "the group")
        return QuantizedWeight.from_mxfp4(*_in_chunks(w, lambda part: _mxfp4(part, rounding)))
    if format == "fp8" and block in ("channel", "tensor"):
        dtype = _default_scale(w, scale_dtype, FLOAT_SCALES)
        made = _in_chunks(w, lambda part: _fp8_channels(part, dtype, block == "tensor"))
        return QuantizedWeight.from_fp8(*made, block=None)
    if format == "fp8":
        if not is_fp8_block(block):
            raise ValueError(f"block is {shown(block)}; (128, 128), 'channel' and 'tensor' are accepted")
        wide = _default_scale(w, scale_dtype or torch.float32, FP8_SCALES)
        return QuantizedWeight.from_fp8(*_in_chunks(w, lambda part: _fp8_blocks(part, FP8_BLOCK, wide)))
    if format == "int4":
        require_one_of("group", group, INT4_GROUPS)
        _require_multiple(w, group, "the group")
        dtype = _default_scale(w, scale_dtype, INT4_SCALES)
        return QuantizedWeight.from_int4(*_in_chunks(w, lambda part: _int4(part, group, dtype)), group=group)
    if format == "nf4":
        require_one_of("blocksize", blocksize, NF4_BLOCKS)
        made = _in_chunks(w, lambda part: _nf4(part, blocksize))
        return QuantizedWeight.from_nf4(*made, tuple(w.shape), blocksize)
    raise ValueError(f"format is {shown(format)}; 'mxfp4', 'fp8', 'int4' and 'nf4' are accepted")
