"""The products of an expert layer with low-rank adapters beside them, each with its gradients."""

from collections.abc import Sequence

from torch import Tensor, nn

from moegemm.layer import Routed
from moegemm.lora.low_rank import LowRank, stacked
from moegemm.products import expert_product, first_product, second_product


def _dropped(x: Tensor, p: float) -> Tensor:
    return nn.functional.dropout(x, p) if p > 0.0 else x


def adapted_first(
    tokens: Tensor, w: Tensor, lows: Sequence[LowRank], routed: Routed, transposed: bool = False,
    allow_tf32: bool = False,
) -> Tensor:  # fmt: skip
    """first_product with adapters: tokens [T, K] -> [M, N] in expert order."""
    rows = first_product(tokens, w, routed, transposed, allow_tf32)
    for a, b, dropout in stacked(lows, tokens.dtype):
        thin = first_product(_dropped(tokens, dropout), a, routed, False, allow_tf32)
        rows = rows + expert_product(thin, b, routed, False, allow_tf32)
    return rows


def adapted_second(
    rows: Tensor, w: Tensor, lows: Sequence[LowRank], routed: Routed, transposed: bool = False,
    allow_tf32: bool = False, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """second_product with adapters: rows [M, K] in expert order -> [M, N] in flat order."""
    out = second_product(rows, w, routed, transposed, allow_tf32, bias)
    for a, b, dropout in stacked(lows, rows.dtype):
        thin = expert_product(_dropped(rows, dropout), a, routed, False, allow_tf32)
        out = out + second_product(thin, b, routed, False, allow_tf32)
    return out
