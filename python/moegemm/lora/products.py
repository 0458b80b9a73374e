"""Single products with low-rank adapters, each with its gradients: for layers whose activation is torch code, and for
adapters that drop elements of their input, which is then no longer that of the product."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moegemm.expert_layer.products import LowRankPart, expert_product, first_product, second_product
from moegemm.expert_layer.weights import AnyWeight, Routed
from moegemm.lora.low_rank import LowRank
from moegemm.operators.registered.factors import RANK_STEP


def _padded(thin: list[Tensor], weights: list[Tensor]) -> LowRankPart:
    """The parts side by side, filled up with zeros to a multiple of RANK_STEP."""
    missing = -sum(rows.size(1) for rows in thin) % RANK_STEP
    if missing:
        thin = [*thin, thin[0].new_zeros((thin[0].size(0), missing))]
        first = weights[0]
        weights = [*weights, first.new_zeros((first.size(0), first.size(1), missing))]
    return LowRankPart(torch.cat(thin, dim=1), torch.cat(weights, dim=2))


def _low_rank_part(thin: list[Tensor], lows: Sequence[LowRank], transposed: bool) -> LowRankPart:
    """scaling * B of each adapter, rounded once to the dtype of the rows, in the layout of W."""
    dtype = thin[0].dtype
    scaled = [low.B.to(dtype) if low.scaling == 1.0 else (low.B.float() * low.scaling).to(dtype) for low in lows]
    rows, weights = _padded(thin, scaled)
    return LowRankPart(rows, weights.transpose(1, 2).contiguous() if transposed else weights)


def _dropped(x: Tensor, low: LowRank) -> Tensor:
    return nn.functional.dropout(x, low.dropout) if low.dropout > 0.0 else x


def adapted_first(
    tokens: Tensor, w: AnyWeight, lows: Sequence[LowRank], routed: Routed, transposed: bool = False,
    allow_tf32: bool = False,
) -> Tensor:  # fmt: skip
    """first_product with adapters: tokens [T, K] -> [M, N] in expert order."""
    if not lows:
        return first_product(tokens, w, routed, transposed, allow_tf32)
    thin = [first_product(_dropped(tokens, low), low.A.to(tokens.dtype), routed, allow_tf32=allow_tf32) for low in lows]
    return first_product(tokens, w, routed, transposed, allow_tf32, _low_rank_part(thin, lows, transposed))


def adapted_second(
    rows: Tensor, w: AnyWeight, lows: Sequence[LowRank], routed: Routed, transposed: bool = False,
    allow_tf32: bool = False, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """second_product with adapters: rows [M, K] in expert order -> [M, N] in flat order."""
    if not lows:
        return second_product(rows, w, routed, transposed, allow_tf32, bias)
    thin = [expert_product(_dropped(rows, low), low.A.to(rows.dtype), routed, allow_tf32=allow_tf32) for low in lows]
    return second_product(rows, w, routed, transposed, allow_tf32, bias, _low_rank_part(thin, lows, transposed))
