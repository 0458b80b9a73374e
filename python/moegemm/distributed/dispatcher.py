"""What moves tokens to the ranks of their experts and back: the protocol that transports are written to."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass
class Dispatched:
    """Rows that have arrived at this rank, whose experts are numbered from 0 here."""

    rows: Tensor  # [R, H]
    expert_ids: Tensor  # [R, k]: experts of this rank; any other number adds nothing
    row_weights: Tensor | None  # [R, k]: weights of those experts. None: `combine` multiplies, or there are none
    num_tokens: Tensor | None = None  # one integer on the device: rows from there on are garbage
    max_rows: int | None = None  # as in moe_mlp: how many (row, expert) pairs there can be
    overflow: Tensor | None = None  # as in moe_mlp
    state: Any = None  # what `combine` needs; nobody else reads it


class Dispatcher(Protocol):
    """A transport between ranks that each hold a part of the experts.

    `dispatch` is followed by one `combine` of the same Dispatched. Both are differentiable and both are collective:
    every rank of the group calls them, also one without tokens.
    """

    def dispatch(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor | None) -> Dispatched:
        """x [T, H], expert_ids [T, topk] of all experts, router_weights [T, topk]."""
        ...

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """What the experts made of the rows, [R, H] in their order -> [T, H]. H and the dtype are those of all ranks:
        here no rank is told that another one has others."""
        ...
