"""A factor on gradients alone: expert gradients sum over the ranks of a group where others are averaged."""

from typing import Any, TypeVar

import torch
from torch import Tensor

_Maybe = TypeVar("_Maybe")


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0] * ctx.factor, None


def scaled_gradient(tensor: _Maybe, factor: float) -> _Maybe:
    """The same tensor, whose gradient is multiplied."""
    if not isinstance(tensor, Tensor) or factor == 1.0:  # none, or a quantised weight, which has no gradient
        return tensor
    scaled: Any = _Scaled.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled  # type: ignore[no-any-return]
