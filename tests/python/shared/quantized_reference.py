"""The quantised formats in plain torch: what every value and scale means. The tests' oracle, and random weights."""

import torch
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
WORDS = ["mxfp4", "fp8/128x128", "fp8/channel", "fp8/tensor", "int4/32", "int4/64", "int4/128", "nf4/64", "nf4/128"]


def _e8m0(scales: Tensor) -> Tensor:
    """2^(s - 127) in double; 255 is NaN."""
    return torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127))


def _exact_scales(scales: Tensor) -> Tensor:
    return _e8m0(scales) if scales.dtype == torch.uint8 else scales.double()


def _nibbles(values: Tensor, high_first: bool) -> Tensor:
    low, high = (values & 15).long(), (values >> 4).long()
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, -1).flatten(-2)


def dequantised(values: Tensor, scales: Tensor, word: str, dtype: torch.dtype) -> Tensor:
    """[E, N, K]: value times scale, rounded once. Both factors have few bits: a product in double is exact, and fp32
    rounds it as the rule asks; bf16 and fp16 round what fp32 holds."""
    name, _, block = word.partition("/")
    factor = _exact_scales(scales)
    if name == "mxfp4":
        exact = E2M1.double()[_nibbles(values, False)] * factor.repeat_interleave(32, -1)
    elif name == "int4":
        places = torch.stack([(values >> (4 * i)) & 15 for i in range(8)], -1).flatten(-2)
        exact = (places.double() - 8) * factor.repeat_interleave(int(block), -1)
    elif name == "nf4":
        codes = _nibbles(values, True)
        flat = NF4.double()[codes.flatten(1)]
        exact = (flat * factor.repeat_interleave(int(block), 1)[:, : flat.size(1)]).view(codes.shape)
    else:
        exact = values.float().double()
        n, k = exact.shape[1:]
        if block == "tensor":
            factor = factor.view(-1, 1, 1)
        elif block == "channel":
            factor = factor.unsqueeze(-1)
        else:
            rows, columns = (int(size) for size in block.split("x"))
            factor = factor.repeat_interleave(rows, 1)[:, :n].repeat_interleave(columns, 2)[:, :, :k]
        exact = exact * factor
    return exact.float().to(dtype)


def random_weight(word: str, experts: int, n: int, k: int, seed: int = 0, scale_dtype: torch.dtype | None = None):
    """Values and scales of every kind that the format has, and of moderate size."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    def positive(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            return numbers(118, 124, shape, dtype)
        return (torch.rand(shape, generator=generator) * 0.05 + 0.01).to(dtype)

    name, _, block = word.partition("/")
    if name == "mxfp4":
        return numbers(0, 256, (experts, n, k // 2), torch.uint8), positive((experts, n, k // 32), torch.uint8)
    if name == "int4":
        packed = numbers(-(2**31), 2**31, (experts, n, k // 8), torch.int32)
        return packed, positive((experts, n, k // int(block)), scale_dtype or torch.bfloat16)
    if name == "nf4":
        return numbers(0, 256, (experts, n, k // 2), torch.uint8), positive(
            (experts, -(-n * k // int(block))), torch.float32
        )
    values = torch.randn((experts, n, k), generator=generator).clamp(-3, 3).to(torch.float8_e4m3fn)
    shapes = {"tensor": (experts,), "channel": (experts, n), "128x128": (experts, -(-n // 128), -(-k // 128))}
    return values, positive(shapes[block], scale_dtype or torch.float32)
