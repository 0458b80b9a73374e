"""Rows as a capacity: what `route` and `moe_mlp` are told about how many rows and tokens there are."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moegemm.operators.errors import shown
from moegemm.operators.gradients.main_grad import count_write
from moegemm.operators.loading import ops
from moegemm.operators.rules import is_integer, require_tensor

_route_compact: Callable[..., tuple[Tensor, Tensor, Tensor]] = ops.route_compact.default


class Capacity(NamedTuple):
    """How many rows there is room for, and where the device tells how many tokens count and if rows were dropped."""

    max_rows: int
    num_tokens: Tensor | None  # [1]
    overflow: Tensor | None  # [1]


def _one_integer(name: str, value: Tensor | None) -> Tensor | None:
    """A scalar as a vector of one, which shares its memory."""
    if value is None:
        return None
    require_tensor(name, value)
    return value.view(1) if value.dim() == 0 else value


def capacity_of(
    expert_ids: Tensor, max_rows: int | None, num_tokens: Tensor | None, overflow: Tensor | None
) -> Capacity | None:
    """What a call says of its rows, or None for one that says nothing: its rows are T * topk. expert_ids: [T, topk]."""
    if max_rows is None and num_tokens is None and overflow is None:
        return None
    require_tensor("expert_ids", expert_ids)
    if max_rows is None:
        max_rows = expert_ids.numel()
    elif not is_integer(max_rows):
        raise TypeError(f"max_rows is {shown(max_rows)} of type {type(max_rows).__name__}; an int or None is accepted")
    return Capacity(
        max_rows,
        _one_integer("num_tokens", num_tokens),
        _one_integer("overflow", overflow),
    )


def route_within(
    capacity: Capacity, expert_ids: Tensor, num_experts: int, wide: bool = False, check: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """m_sizes [E], gather_indices [max_rows] and positions [T, topk]."""
    max_rows, num_tokens, overflow = capacity
    routed = _route_compact(expert_ids, num_experts, max_rows, num_tokens, overflow, wide, check)
    if overflow is not None:
        count_write(overflow)
    return routed
