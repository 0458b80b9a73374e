"""Single products of an expert layer with gradients, for layers whose activation or adapters are torch code.

`first_product` reads tokens and gives rows in expert order, `second_product` takes those and gives rows in flat order,
`expert_product` stays in expert order. W is [E, N, K], or [E, K, N] with transposed; neither is copied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.expert_layer.weights import AnyWeight, Routed, Weights
from moegemm.operators.errors import explain
from moegemm.operators.gradients.derivatives import differentiated_once, refuse_forward_mode, vmap_refusal
from moegemm.operators.loading import ops
from moegemm.operators.options import ALLOW_TF32, PERMUTE_Y, TRANSPOSED
from moegemm.operators.packed import Packed, split
from moegemm.operators.row_products import dx as _dx
from moegemm.operators.row_products import forward as _forward
from moegemm.operators.row_products import forward_low_rank as _forward_low_rank
from moegemm.operators.shortcuts import apply_function

_dw: Callable[..., Tensor] = ops.dw.default
_expert_sums: Callable[..., Tensor] = ops.expert_sums.default

FIRST, SECOND, WITHIN = 0, 1, 2
_NAME = "a product of an expert layer"  # in messages


class LowRankPart(NamedTuple):
    """What is added to a product inside it: rows in expert order times weights in the layout of W."""

    rows: Tensor  # [M, r]
    weights: Tensor  # [E, N, r], or [E, r, N] with transposed


def _run(
    role: int, weights: Weights, x: Tensor, w: AnyWeight, routed: Routed, bias: Tensor | None, low: LowRankPart | None
) -> Tensor:
    if low is not None:
        words = (routed.reads_tokens() if role == FIRST else PERMUTE_Y) + weights.options
        return _forward_low_rank(x, w, *routed[:2], *low, routed.topk, words, bias)
    if role == FIRST:
        return weights.from_tokens(x, w, routed)
    if role == SECOND:
        return weights.to_flat(x, w, routed, bias)
    return _forward(x, w, routed.m_sizes, None, None, 1, weights.options)


def _input_gradient(role: int, weights: Weights, dy: Tensor, w: AnyWeight, routed: Routed) -> Tensor:
    if role == FIRST:
        return weights.tokens_gradient(dy, w, routed)
    if role == SECOND:
        return _dx(dy, w, *routed[:2], None, routed.topk, PERMUTE_Y + weights.options)
    return _dx(dy, w, routed.m_sizes, None, None, 1, weights.options)


def _weight_gradient(role: int, weights: Weights, dy: Tensor, x: Tensor, routed: Routed) -> Tensor | None:
    if role == FIRST:
        return weights.gradient_of_first(dy, x, routed).compute()
    if role == SECOND:
        return _dw(dy, x, *routed[:2], None, routed.topk, PERMUTE_Y + weights.options)
    return _dw(dy, x, routed.m_sizes, None, None, 1, weights.options)


def _low_rank_gradients(
    role: int, weights: Weights, dy: Tensor, low: LowRankPart, routed: Routed
) -> tuple[Tensor, Tensor | None]:
    """Those of its rows and its weights."""
    within = SECOND if role == SECOND else WITHIN
    rows = _input_gradient(within, weights, dy, low.weights, routed)
    return rows, _weight_gradient(within, weights, dy, low.rows, routed)


class _Product(torch.autograd.Function):
    """`bias` is the second product's; `low_rows` and `low_weights` make a LowRankPart of the first or second; `scales`
    are those of a quantised w."""

    @staticmethod
    def forward(
        role: int, weights: Weights, x: Tensor, w: Tensor, bias: Tensor | None,
        m_sizes: Tensor, gather_indices: Tensor, topk: int, low_rows: Tensor | None = None,
        low_weights: Tensor | None = None, scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        low = None if low_rows is None or low_weights is None else LowRankPart(low_rows, low_weights)
        return _run(role, weights, x, weights.joined(w, scales), Routed(m_sizes, gather_indices, topk), bias, low)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        role, weights, x, w, _, m_sizes, gather_indices, topk, *low = inputs
        _, _, need_x, need_w, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_w else None, w if need_x else None, m_sizes, gather_indices, *low)
        ctx.call = role, weights, topk

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        d_x, d_w, d_bias, *low = differentiated_once(_NAME, _gradients, ctx, gradients[0])
        return None, None, d_x, d_w, d_bias, None, None, None, *low, None  # torch drops None for what was not given

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal(_NAME)


def _gradients(ctx: Any, dy: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Those of x, w, the bias and the low-rank part, each if needed; w and x are None where they are not."""
    role, weights, topk = ctx.call
    x, w, m_sizes, gather_indices, *more = saved
    low_rows, low_weights, scales = (*more, None, None, None)[:3]
    w = weights.joined(w, scales)
    routed = Routed(m_sizes, gather_indices, topk)
    _, _, need_x, need_w, need_bias, *_ = ctx.needs_input_grad
    dx = _input_gradient(role, weights, dy, w, routed) if need_x else None
    dw = _weight_gradient(role, weights, dy, x, routed) if need_w else None
    # dY has one row per slot: every slot is a token of its own.
    db = _expert_sums(dy, m_sizes, gather_indices, None, 1) if need_bias else None
    if low_rows is None or low_weights is None:
        return dx, dw, db, None, None
    return dx, dw, db, *_low_rank_gradients(role, weights, dy, LowRankPart(low_rows, low_weights), routed)


def _product(
    role: int, x: Tensor, w: AnyWeight, routed: Routed, transposed: bool, allow_tf32: bool, bias: Tensor | None = None,
    low: LowRankPart | None = None,
) -> Tensor:  # fmt: skip
    refuse_forward_mode(_NAME, x, w, bias)
    word = w.word if isinstance(w, Packed) else ""
    weights = Weights((TRANSPOSED if transposed else "") + (ALLOW_TF32 if allow_tf32 else ""), None, word)
    (values,), scales = split((w,), (0,))
    rest = (*(low or (None, None)), *scales) if scales else (low or ())
    try:
        result: Tensor = apply_function(_Product, role, weights, x, values, bias, *routed[:3], *rest)
    except RuntimeError as error:
        raise explain(error, {"X": x, "W": w}) from None
    return result


def first_product(
    x: Tensor, w: AnyWeight, routed: Routed, transposed: bool = False, allow_tf32: bool = False,
    low: LowRankPart | None = None,
) -> Tensor:  # fmt: skip
    """x [T, K] -> [M, N] in expert order."""
    return _product(FIRST, x, w, routed, transposed, allow_tf32, None, low)


def second_product(
    rows: Tensor, w: AnyWeight, routed: Routed, transposed: bool = False, allow_tf32: bool = False,
    bias: Tensor | None = None, low: LowRankPart | None = None,
) -> Tensor:  # fmt: skip
    """rows [M, K] in expert order -> [M, N] in flat order, plus the expert's bias [E, N]."""
    return _product(SECOND, rows, w, routed, transposed, allow_tf32, bias, low)


def expert_product(rows: Tensor, w: Tensor, routed: Routed, allow_tf32: bool = False) -> Tensor:
    """rows [M, K] in expert order, W [E, N, K] -> [M, N] in expert order."""
    return _product(WITHIN, rows, w, routed, False, allow_tf32)
