"""Rows from every rank to every other: torch's functional collectives, and what autograd has to know of them.

The gradient of an exchange is the exchange in the other direction with the same splits, so that a backward never asks
for sizes. Every Function here runs its collectives whatever gradients are wanted: a rank that skipped one would leave
the others waiting.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moegemm.operators.loading import ops

_combine_rows: Callable[..., Tensor] = ops.combine_rows.default
_spread_rows: Callable[..., Tensor] = ops.spread_rows.default
_index_arrivals: Callable[..., tuple[Tensor, Tensor, Tensor]] = ops.index_arrivals.default
_collectives: Any = torch.ops._c10d_functional


class Splits(NamedTuple):
    """How many rows travel between this rank and each other one."""

    group: str  # the process group's name: torch.compile takes no objects
    sent: list[int]
    received: list[int]
    mirrored: bool = False  # a fake process group moves nothing: what is sent counts as received

    def _start(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        if self.mirrored:
            return rows.clone()
        pending: Tensor = _collectives.all_to_all_single(rows.contiguous(), received, sent, self.group)
        return pending

    def start(self, rows: Tensor) -> Tensor:
        """[sent rows, C] -> [received rows, C], which must not be read before `finished`."""
        return self._start(rows, self.received, self.sent)

    def forth(self, rows: Tensor) -> Tensor:
        """[sent rows, C] -> [received rows, C]."""
        return self.finished(self.start(rows))

    def back(self, rows: Tensor) -> Tensor:
        """[received rows, C] -> [sent rows, C]."""
        return self.finished(self._start(rows, self.sent, self.received))

    def finished(self, pending: Tensor) -> Tensor:
        if self.mirrored:
            return pending
        done: Tensor = _collectives.wait_tensor(pending)
        return done


def is_fake(group: dist.ProcessGroup) -> bool:
    return str(dist.get_backend(group)) == "fake"


def equal_splits(group: dist.ProcessGroup, rows: int) -> Splits:
    """As many rows to each rank."""
    every = [rows] * group.size()
    return Splits(group.group_name, every, every, is_fake(group))


class Order(NamedTuple):
    """Which slot of which token is where in what a rank sends."""

    slots: Tensor  # [sent rows]: the flat slot of each, -1 where a place stays empty
    per_slot: bool  # False where a row stands for all slots of its token on one rank
    positions: Tensor  # [T, topk]: the sent row of each slot, -1 for none
    gaps: bool  # whether places may stay empty


def packed(rows: Tensor, order: Order) -> Tensor:
    """The rows [T, C] of tokens as they are sent; an empty place gets zeros."""
    return _spread_rows(rows, order.positions, order.slots if order.gaps else None, order.slots.size(0))


def packed_weights(weights: Tensor, order: Order) -> Tensor:
    """Router weights [T, topk] as they travel: [sent rows, 1] for slots, [sent rows, topk] for tokens."""
    if not order.per_slot:
        return packed(weights, order)
    of_slots = weights.reshape(-1, 1)
    if order.gaps:
        return _combine_rows(of_slots, None, order.slots.unsqueeze(1), False)
    return of_slots.index_select(0, order.slots)


def summed(rows: Tensor, order: Order) -> Tensor:
    """The sum [T, C] of each token's rows, in fp32 and in the order of its slots."""
    if order.positions.size(1) > 1 or rows.size(0) == 0:
        return _combine_rows(rows, None, order.positions, False)
    # A sum of one row has its bits, the sign of a zero included.
    positions = order.positions.view(-1)
    return rows.index_select(0, positions.clamp(min=0)).masked_fill((positions < 0).unsqueeze(1), 0.0)


def weights_at_home(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    """The gradient [T, topk] of router weights, from one that came back with the rows."""
    if not order.per_slot:
        return _combine_rows(rows.float(), None, order.positions, False).to(weights.dtype)
    positions = order.positions.reshape(-1)
    if rows.size(0) == 0:
        return torch.zeros_like(weights)
    of_slots = rows.view(-1).index_select(0, positions.clamp(min=0))
    return of_slots.masked_fill(positions < 0, 0.0).view(weights.shape).to(weights.dtype)


def arrived(counts: Tensor, splits: Splits, gaps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [R, 1] of the received rows, and those rows sorted by expert: m_sizes and gather_indices.

    Each rank's rows come in the order of experts, so that the counts tell all of it. A stable sort then has an expert's
    rows in the order of ranks and of tokens within each: that of one process which holds all tokens.
    """
    room = splits.received[0] if gaps else -1
    m_sizes, gather_indices, ids = _index_arrivals(counts, sum(splits.received), room)
    return ids.unsqueeze(1), m_sizes, gather_indices


class Sent(torch.autograd.Function):
    """Tokens and router weights to the ranks of their experts. `counts` [ranks, E here] is how many rows come from each
    rank for each expert; what is known from it is made while the rows travel: `arrived` has it."""

    @staticmethod
    def forward(
        ctx: Any, splits: Splits, x: Tensor, weights: Tensor | None, counts: Tensor | None, slots: Tensor,
        per_slot: bool, positions: Tensor, gaps: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        order = Order(slots, per_slot, positions, gaps)
        row_weights = None if weights is None else splits.forth(packed_weights(weights, order))
        pending = splits.start(packed(x, order))
        indices = () if counts is None else arrived(counts, splits, gaps)
        rows = splits.finished(pending)
        constant = [] if ctx.needs_input_grad[1] else [rows]
        constant += [] if row_weights is None or ctx.needs_input_grad[2] else [row_weights]
        ctx.mark_non_differentiable(*constant, *indices)
        ctx.save_for_backward(slots, positions, weights)
        ctx.splits, ctx.per_slot, ctx.gaps = splits, per_slot, gaps
        return rows, row_weights, *indices

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor, d_row_weights: Tensor | None, *_: None) -> tuple[Any, ...]:
        slots, positions, weights = ctx.saved_tensors
        order, splits = Order(slots, ctx.per_slot, positions, ctx.gaps), ctx.splits
        d_x = d_weights = None
        if ctx.needs_input_grad[1]:
            d_x = summed(splits.back(d_rows), order)
        if ctx.needs_input_grad[2] and d_row_weights is not None:
            d_weights = weights_at_home(splits.back(d_row_weights), weights, order)
        return None, d_x, d_weights, None, None, None, None, None


class Returned(torch.autograd.Function):
    """Rows of experts back to the ranks of their tokens, in the order in which those were sent."""

    @staticmethod
    def forward(ctx: Any, splits: Splits, rows: Tensor) -> Tensor:
        ctx.splits = splits
        return splits.back(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, ctx.splits.forth(gradients[0])


class Combined(torch.autograd.Function):
    """`Returned`, and then the weighted sum of each token's rows. For experts that know their rows' weights.

    Its gradient of a row is that of its token, *without* the weight: the experts multiply by it where they round
    anyway, and make the weight's gradient. Both are then what one process computes, to the last bit.
    """

    @staticmethod
    def forward(
        ctx: Any, splits: Splits, rows: Tensor, weights: Tensor | None, slots: Tensor, positions: Tensor, gaps: bool
    ) -> Tensor:
        ctx.save_for_backward(slots, positions)
        ctx.splits, ctx.gaps = splits, gaps
        return _combine_rows(splits.back(rows), weights, positions, False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        slots, positions = ctx.saved_tensors
        d_rows = ctx.splits.forth(packed(gradients[0], Order(slots, True, positions, ctx.gaps)))
        return None, d_rows, None, None, None, None
