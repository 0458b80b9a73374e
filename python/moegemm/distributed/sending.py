"""What a rank sends, and in which order: made of expert ids on their device, without waiting for it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moegemm.capacity import Capacity, route_within
from moegemm.distributed.exchange import Order
from moegemm.operators.loading import ops

_first_slots: Callable[..., tuple[Tensor, Tensor]] = ops.first_slots.default
_ids_at_target: Callable[..., Tensor] = ops.ids_at_target.default


class Sending(NamedTuple):
    """Slots sorted by where they go."""

    counts: Tensor  # [ranks, E of each] int64: rows for each expert; [ranks, 1] where a row goes to a rank
    gather_indices: Tensor  # [max rows]: the flat slot of each sent row
    positions: Tensor  # [T, topk]: the sent row of each slot, -1 for none
    ranks_of_slots: Tensor | None  # [T, topk]: of slots without a position nobody reads it; None: nobody does
    note: Tensor | None  # [ranks] int64: (row, expert) pairs for each rank, or rows that were left out; None: neither


def once_per_slot(expert_ids: Tensor, num_experts: int, ranks: int, room: bool = False) -> Sending:
    """A row for every slot, sorted by expert, which is by rank too. With `room` it goes on to `with_room`."""
    capacity = Capacity(expert_ids.numel(), None, None)
    m_sizes, gather_indices, positions = route_within(capacity, expert_ids, num_experts)
    counts = m_sizes.view(ranks, -1).long()
    owners = expert_ids.div(num_experts // ranks, rounding_mode="floor") if room else None
    return Sending(counts, gather_indices, positions, owners, None)


def once_per_rank(expert_ids: Tensor, num_experts: int, ranks: int) -> Sending:
    """A row for every rank that has an expert for the token: that of its first slot there."""
    owners, pairs = _first_slots(expert_ids, num_experts // ranks, ranks)
    capacity = Capacity(owners.size(0) * min(owners.size(1), ranks), None, None)
    m_sizes, gather_indices, positions = route_within(capacity, owners, ranks)
    return Sending(m_sizes.view(ranks, 1).long(), gather_indices, positions, owners, pairs)


def with_room(sending: Sending, room: int) -> Sending:
    """The same with `room` places for every rank; `note` becomes how many rows this rank has left out at most."""
    counts, gather_indices, positions, owners, _ = sending
    assert owners is not None
    ranks = counts.size(0)
    ends = counts.cumsum(1)  # within each rank
    of_ranks = ends[:, -1]
    starts = of_ranks.cumsum(0) - of_ranks
    places = torch.arange(room, device=counts.device)
    used = places < of_ranks.unsqueeze(1)  # [ranks, room]
    nothing = gather_indices.size(0)  # the place after the last has a -1
    source = torch.where(used, starts.unsqueeze(1) + places, nothing)
    slots = torch.nn.functional.pad(gather_indices, (0, 1), value=-1)[source.view(-1)]
    rank = owners.clamp(0, ranks - 1).long()
    within = positions - starts[rank]
    kept = (positions >= 0) & (within < room)
    new_positions = torch.where(kept, rank * room + within, -1).to(positions.dtype)
    kept_counts = ends.clamp(max=room).diff(dim=1, prepend=counts.new_zeros(ranks, 1))
    left_out = (of_ranks - room).clamp(min=0).max().expand(ranks)
    return Sending(kept_counts, slots, new_positions, owners, left_out)


def order_of(sending: Sending, rows: int, per_slot: bool, gaps: bool) -> Order:
    """The order of the `rows` that are sent."""
    return Order(sending.gather_indices[:rows], per_slot, sending.positions, gaps)


def ids_at_target(expert_ids: Tensor, order: Order, experts_of_rank: int) -> Tensor:
    """[sent rows, topk]: each row's experts as its target counts them, -1 for those of other ranks."""
    return _ids_at_target(expert_ids, order.slots, experts_of_rank).to(expert_ids.dtype)
