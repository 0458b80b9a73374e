"""A quantised W as the operators take it: packed values, their scales, and a word that says how to read both.

| word | values | scales |
|---|---|---|
| mxfp4 | uint8 [E, N, K / 2], the even column in the low nibble | uint8 (e8m0) [E, N, K / 32] |
| fp8/128x128 | float8_e4m3fn [E, N, K] | [E, ceil(N / 128), ceil(K / 128)] |
| fp8/channel, fp8/tensor | the same | [E, N], [E] |
| int4/32, /64, /128 | int32 [E, N, K / 8], column i of eight in bits 4 i to 4 i + 3, q + 8 | [E, N, K / group] |
| nf4/64, 32 to 4096 | uint8 [E, N, K / 2], the even column in the high nibble | fp32 [E, ceil(N K / block)] |
| nf4/64/NxK, K odd | uint8 [E, ceil(N K / 2)] | the same |

Scales of fp8 are fp32, bf16, fp16 or e8m0 (as uint8), those of int4 bf16 or fp16.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

REFUSED_GRADIENT = (
    "a quantised weight is frozen and has no gradient: train low-rank adapters beside it (moegemm.LoraAdapter, PEFT), "
    "or train weights that are not quantised"
)


# Values in an element of the packed tensor.
VALUES_PER_ELEMENT = {"mxfp4": 2, "fp8": 1, "int4": 8, "nf4": 2}


def format_of(word: str) -> str:
    """The format's name without its block."""
    return word.partition("/")[0]


def packed_shape(w: Tensor, w_format: str) -> tuple[int, int, int]:
    """E, N and K."""
    name, *rest = w_format.split("/")
    if w.dim() == 2 and len(rest) == 2:  # flat nf4 with its shape
        n, k = map(int, rest[1].split("x"))
        return w.size(0), n, k
    return w.size(0), w.size(1), w.size(2) * VALUES_PER_ELEMENT[name]


class Packed:
    """What a product reads of a QuantizedWeight. It owns nothing and costs a call no more than a tuple would."""

    requires_grad = False

    def __init__(self, values: Tensor, scales: Tensor, word: str, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the activations, where somebody asks for the dtype of the weight that this stands for."""
        self.values, self.scales, self.word, self.dtype = values, scales, word, dtype

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        return torch.Size(packed_shape(self.values, self.word))

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def dim(self) -> int:
        return 3

    def stand_in(self, like: Tensor) -> Tensor:
        """A tensor [E, N, K] in the dtype of the activations that has no memory: what rules about shapes read."""
        return self.values.new_empty((), dtype=like.dtype).expand(self.shape)


def split(tensors: Sequence[Any], places: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Tensor | None, ...]]:
    """The tensors with the values of quantised weights in their places, and the scales of those at `places`; no scales
    at all where none is quantised."""
    if not any(isinstance(tensors[place], Packed) for place in places):
        return tuple(tensors), ()
    flat = tuple(t.values if isinstance(t, Packed) else t for t in tensors)
    scales = tuple(t.scales if isinstance(t, Packed) else None for t in (tensors[place] for place in places))
    return flat, scales
