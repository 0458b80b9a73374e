"""What torch has to know of routing with a capacity and of the top-k sum by position: shapes, and a gradient in plain
torch, which can be differentiated again. Nothing of it has T * topk rows of C columns."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor

from moegemm.operators.gradients.derivatives import vmap_refusal
from moegemm.operators.loading import ops


def _route_compact(
    expert_ids: Tensor, num_experts: int, max_rows: int, num_tokens: Tensor | None, overflow: Tensor | None, wide: bool,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = torch.int64 if wide else torch.int32
    return (
        expert_ids.new_empty((num_experts,), dtype=dtype),
        expert_ids.new_empty((max_rows,), dtype=dtype),
        expert_ids.new_empty(expert_ids.shape, dtype=dtype),
    )


def _combine_rows(rows: Tensor, weights: Tensor | None, positions: Tensor, float32_output: bool) -> Tensor:
    shape = (positions.size(0), rows.size(1))
    return rows.new_empty(shape, dtype=torch.float32 if float32_output else rows.dtype)


def _spread_rows(rows: Tensor, positions: Tensor, gather_indices: Tensor | None, count: int) -> Tensor:
    return rows.new_empty((count, rows.size(1)))


def _first_slots(expert_ids: Tensor, experts_of_rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    return (
        expert_ids.new_empty(expert_ids.shape, dtype=torch.int64),
        expert_ids.new_empty((ranks,), dtype=torch.int64),
    )


def _ids_at_target(expert_ids: Tensor, gather_indices: Tensor, experts_of_rank: int) -> Tensor:
    return expert_ids.new_empty((gather_indices.size(0), expert_ids.size(1)), dtype=torch.int64)


def _index_arrivals(counts: Tensor, rows: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        counts.new_empty((counts.size(1),), dtype=torch.int32),
        counts.new_empty((rows,), dtype=torch.int32),
        counts.new_empty((rows,), dtype=torch.int64),
    )


FAKES: dict[str, Callable[..., Any]] = {
    "route_compact": _route_compact,
    "combine_rows": _combine_rows,
    "spread_rows": _spread_rows,
    "first_slots": _first_slots,
    "ids_at_target": _ids_at_target,
    "index_arrivals": _index_arrivals,
}


def _inside(positions: Tensor, rows: int) -> Tensor:
    return (positions >= 0) & (positions < rows)


def _slots_of_rows(positions: Tensor, rows: int) -> Tensor:
    """[rows]: the flat slot that names each row, -1 for a row that nobody names."""
    flat = positions.reshape(-1).long()
    target = torch.where(_inside(flat, rows), flat, rows)  # one place past the rows takes what has none
    slots = torch.arange(flat.size(0), device=flat.device)
    return torch.full((rows + 1,), -1, dtype=torch.int64, device=flat.device).scatter(0, target, slots)[:rows]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, positions, _ = inputs
    weights_need_grad = weights is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if weights_need_grad else None, weights, positions)
    ctx.rows_dtype = rows.dtype
    ctx.count = rows.size(0)


def _may_be_zero(size: Any) -> bool:
    """Whether it is, or tracing cannot know."""
    if not isinstance(size, torch.SymInt):
        return bool(size == 0)
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(size == 0)


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, positions = ctx.saved_tensors
    need_rows, count = ctx.needs_input_grad[0], ctx.count
    factors = None if weights is None else weights.reshape(-1)
    if _may_be_zero(positions.size(0)):  # something to gather from, which nobody names
        gradient = F.pad(gradient, (0, 0, 0, 1))
        factors = None if factors is None else F.pad(factors, (0, 1))
    slots = _slots_of_rows(positions, count)
    named = (slots >= 0).unsqueeze(1)
    slots = slots.clamp(min=0)
    of_rows = gradient[slots // positions.size(1)]
    d_rows = d_weights = None
    if need_rows:
        d_rows = of_rows if factors is None else of_rows.float() * factors[slots].float().unsqueeze(1)
        d_rows = torch.where(named, d_rows.to(ctx.rows_dtype), 0)
    if rows is not None:
        dots = F.pad((rows.float() * of_rows.float()).sum(-1), (0, 1))  # and zero for a slot that has no row
        at = torch.where(_inside(positions, count), positions.long(), count)
        d_weights = dots[at].to(weights.dtype).reshape(weights.shape)
    return d_rows, d_weights, None, None


class TransformedCombineRows(torch.autograd.Function):
    """The operator inside torch.func's transforms, which take no gradient that is registered."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        result: Tensor = ops.combine_rows.default(*arguments)
        return result

    setup_context = staticmethod(setup_context)
    backward = staticmethod(backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal("moegemm.combine")
