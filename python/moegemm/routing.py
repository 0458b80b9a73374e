"""What happens around the products: sorting rows by expert, and bringing a token's rows back together."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegemm.capacity import capacity_of, route_within
from moegemm.operators.errors import explain
from moegemm.operators.gradients.combine import TransformedCombine
from moegemm.operators.gradients.derivatives import refuse_forward_mode, refuse_traced_forward_mode, transforms_active
from moegemm.operators.loading import ops
from moegemm.operators.registered.compact import TransformedCombineRows
from moegemm.operators.rules import require_int, require_tensor

_combine: Callable[..., Tensor] = ops.combine.default
_combine_rows: Callable[..., Tensor] = ops.combine_rows.default


def _combine_transformed(*arguments: Any) -> Tensor:
    refuse_traced_forward_mode("combine")
    result: Tensor = TransformedCombine.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def route(
    expert_ids: Tensor,
    num_experts: int,
    *,
    dtype: torch.dtype = torch.int32,
    return_inverse: bool = False,
    max_rows: int | None = None,
    num_tokens: Tensor | None = None,
    overflow: Tensor | None = None,
    check: bool = False,
) -> tuple[Tensor, ...]:
    """Sorts the M = T * topk routed rows by expert, stably, on their device and without synchronising.

    Shapes:
        expert_ids: [T, topk], int32 or int64; ids outside [0, num_experts) sort after all segments.
        Returns m_sizes [E] and gather_indices [M] of `dtype` (int32 or int64), and with return_inverse also the
        position [M] that each flat row got.

    With max_rows, num_tokens or overflow rows are a capacity. Then ids outside [0, num_experts) take no row at all, nor
    do tokens from num_tokens on: one integer on the device, so that nothing synchronises. gather_indices is [max_rows],
    -1 where it has no row, and the positions are [T, topk], -1 where a slot has none. Rows that do not fit are dropped,
    those at the last positions; m_sizes counts what is kept. overflow, one int32 or int64 on the device, becomes 1
    then, and is left alone otherwise. check (or MOEGEMM_CHECK=1) synchronises and raises with the first of them.

    >>> import torch, moegemm
    >>> moegemm.route(torch.tensor([[2, 0], [0, 1]]), 3)
    (tensor([2, 1, 1], dtype=torch.int32), tensor([1, 2, 3, 0], dtype=torch.int32))
    >>> moegemm.route(torch.tensor([[7, 0], [0, 1]]), 3, max_rows=4)
    (tensor([2, 1, 0], dtype=torch.int32), tensor([ 1,  2,  3, -1], dtype=torch.int32))
    """
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"dtype is {dtype}; torch.int32 and torch.int64 are accepted")
    require_int("num_experts", num_experts)
    wide = dtype == torch.int64
    try:
        capacity = capacity_of(expert_ids, max_rows, num_tokens, overflow)
        if capacity is None:
            m_sizes, gather_indices, inverse = ops.route.default(expert_ids, num_experts, wide, return_inverse)
        else:
            m_sizes, gather_indices, inverse = route_within(capacity, expert_ids, num_experts, wide, check)
    except RuntimeError as error:
        raise explain(error, {"expert_ids": expert_ids}) from None
    return (m_sizes, gather_indices, inverse) if return_inverse else (m_sizes, gather_indices)


def _combine_by_position(
    rows: Tensor, weights: Tensor | None, positions: Tensor, topk: int | None, float32_output: bool
) -> Tensor:
    require_tensor("positions", positions)
    if positions.dim() != 2 or topk not in (None, positions.size(1)):
        raise ValueError(
            f"positions is {list(positions.shape)}, topk is {topk}; positions must be [T, topk], topk its width or None"
        )
    refuse_forward_mode("combine by position", rows, weights)
    try:
        run = TransformedCombineRows.apply if transforms_active() else _combine_rows
        result: Tensor = run(rows, weights, positions, float32_output)
    except RuntimeError as error:
        raise explain(error, {"rows": rows, "weights": weights, "positions": positions}) from None
    return result


def combine(
    rows: Tensor,
    weights: Tensor | None = None,
    topk: int | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Sums each token's rows, weighted: out[t] = sum over s of weights[t, s] * rows[t * topk + s]. Differentiable.

    Shapes:
        rows: [M, C] in flat order. weights: [T, topk], or [M] with topk given; fp32 or rows' dtype; None: plain sum.
        Returns [T, C] in rows' dtype or, with out_dtype, fp32. The sum is in fp32, slots in order, rounded once.

    With positions [T, topk], as `route` with a capacity gives them, rows are [R, C] in any order and slot s of token t
    has rows[positions[t, s]], or nothing where that is outside [0, R). No row may be named twice for its gradient to be
    that of all its slots. A row that nobody names gets a gradient of zeros, whatever is in it.

    >>> import torch, moegemm
    >>> moegemm.combine(torch.ones(4, 2), torch.tensor([[0.25, 0.75], [1.0, 2.0]]))
    tensor([[1., 1.],
            [3., 3.]])
    """
    require_tensor("rows", rows)
    if out_dtype not in (None, torch.float32, rows.dtype):
        raise TypeError(f"out_dtype is {out_dtype}; torch.float32 and {rows.dtype}, the dtype of rows, are accepted")
    if positions is not None:
        return _combine_by_position(rows, weights, positions, topk, out_dtype == torch.float32)
    if topk is None:
        if not isinstance(weights, Tensor) or weights.dim() != 2:
            raise ValueError("topk is None; it is needed unless weights is [T, topk]")
        topk = weights.size(1)
    try:
        run = _combine_transformed if transforms_active() else _combine
        result = run(rows, weights, topk, out_dtype == torch.float32)
    except RuntimeError as error:
        raise explain(error, {"rows": rows, "weights": weights}, topk) from None
    return result
