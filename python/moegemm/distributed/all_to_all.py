"""The dispatcher on torch.distributed alone: any backend, no copy of tokens but the one that is sent."""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moegemm.distributed.agreement import (
    REFUSED,
    Settings,
    agree_on,
    device_for,
    number_of,
    require_agreement,
    tell_refusal,
)
from moegemm.distributed.dispatcher import Dispatched
from moegemm.distributed.exchange import Combined, Order, Returned, Sent, Splits, equal_splits, is_fake
from moegemm.distributed.sending import Sending, ids_at_target, once_per_rank, once_per_slot, order_of, with_room
from moegemm.formats import FORMATS
from moegemm.operators.errors import shown
from moegemm.operators.rules import (
    is_integer,
    require_dtype,
    require_same_device,
    require_tensor,
    require_weight_of_each_slot,
)
from moegemm.routing import combine


class _State(NamedTuple):
    """What came of a dispatch, for the way back."""

    splits: Splits
    order: Order
    router_weights: Tensor | None  # None where the experts multiply by them
    m_sizes: Tensor | None = None
    gather_indices: Tensor | None = None


def process_group(group: Any) -> dist.ProcessGroup:
    """That of a DeviceMesh with one dimension, or the group itself; None is all ranks."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group is None and torch.distributed has none; call init_process_group first")
        default: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        return default
    if not hasattr(group, "get_group"):
        raise TypeError(f"group is {shown(group)}; a ProcessGroup, a DeviceMesh with one dimension or None is accepted")
    if group.ndim != 1:
        raise ValueError(f"the mesh has dimensions {group.mesh_dim_names}; give the one of the experts, as mesh['ep']")
    found: dist.ProcessGroup = group.get_group()
    return found


class AllToAll:
    """Exchanges rows with torch.distributed's all_to_all_single: NCCL, gloo, or any other backend that has it.

    group: a ProcessGroup, a DeviceMesh with one dimension, or None for all ranks. Rank r of it holds the experts from
    r * num_experts / size on. Making one is collective: ranks that ask for different things all get an error.

    A row travels for every (token, expert) pair, so that results have the bits of one process with all tokens. A call
    waits for the device once, to learn how many rows come; a backward never does. With `rows_per_peer` every rank sends
    room for that many rows to every other, and nothing waits: what does not fit is dropped and counted in `overflow`
    (see `check`). `unique` sends a token once to each rank that has an expert for it, and that rank sums: fewer bytes,
    and other rounding.

    `overflow` is [ranks], int64 on the device of the calls: the most rows that each rank had for another beyond what
    fits; it has a value after the first call.
    """

    def __init__(self, group: Any, num_experts: int, *, rows_per_peer: int | None = None, unique: bool = False) -> None:
        self.group = process_group(group)
        self.name: str = self.group.group_name
        self.ranks: int = self.group.size()
        self.num_experts, self.rows_per_peer, self.unique = num_experts, rows_per_peer, unique
        self.mirrored = is_fake(self.group)
        refusal: Exception | None = None
        try:
            self._require_valid()
        except (TypeError, ValueError) as error:
            refusal = error
        self._asked: Settings = {"num_experts": num_experts, "rows_per_peer": rows_per_peer, "unique": unique}
        agree_on(self.group, self._asked, refusal)
        self.experts_here = num_experts // self.ranks
        self.width = self.experts_here  # of an exchange of counts, alike whatever is sent; see choosing.py too
        self.overflow: Tensor | None = None
        self._compared = False

    def _require_valid(self) -> None:
        if not is_integer(self.num_experts) or self.num_experts < 1:
            raise ValueError(f"num_experts is {shown(self.num_experts)}; an int of at least 1 is accepted")
        if self.num_experts % self.ranks:
            raise ValueError(
                f"num_experts is {self.num_experts}; it must be a multiple of the {self.ranks} ranks of the group"
            )
        room = self.rows_per_peer
        if room is not None and (not is_integer(room) or room < 1):
            raise ValueError(f"rows_per_peer is {shown(room)}; None or an int of at least 1 is accepted")

    def __repr__(self) -> str:
        room = "" if self.rows_per_peer is None else f", rows_per_peer={self.rows_per_peer}"
        return f"AllToAll({self.ranks} ranks, {self.num_experts} experts{room}{', unique=True' if self.unique else ''})"

    def dispatch(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor | None) -> Dispatched:
        """See Dispatcher. The weights stay here, and `combine` multiplies; with `unique` they travel."""
        try:
            self._require_tokens(x, expert_ids, router_weights)
        except (TypeError, ValueError) as error:
            self.refuse(error, x)
            raise
        return self.send(x, expert_ids, router_weights, weights_travel=self.unique)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See Dispatcher."""
        splits, order, router_weights, *_ = self._state_of(rows, dispatched)
        at_home: Tensor = Returned.apply(splits, rows)  # type: ignore[no-untyped-call]
        return combine(at_home, router_weights, positions=order.positions)

    def combine_weighted_rows(self, rows: Tensor, dispatched: Dispatched, router_weights: Tensor | None) -> Tensor:
        """`combine` for experts that multiply by their rows' weights in the backward; see exchange.Combined."""
        splits, order, *_ = self._state_of(rows, dispatched)
        out: Tensor = Combined.apply(  # type: ignore[no-untyped-call]
            splits, rows, None if router_weights is None else router_weights.detach(), order.slots, order.positions,
            order.gaps,
        )  # fmt: skip
        return out

    def _state_of(self, rows: Tensor, dispatched: Dispatched) -> _State:
        state = dispatched.state
        if not isinstance(state, _State) or state.splits.group != self.name:
            raise ValueError(
                "dispatched is not from this dispatcher, or was combined already; one combine per dispatch"
            )
        if rows.dim() != 2 or rows.size(0) != dispatched.rows.size(0):
            raise ValueError(
                f"rows is {list(rows.shape)}; its shape must be [R, H] with R = {dispatched.rows.size(0)}, the rows "
                "that were dispatched"
            )
        dispatched.state = None
        return state

    def _require_tokens(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor | None) -> None:
        require_tensor("x", x)
        require_tensor("expert_ids", expert_ids)
        if x.dim() != 2 or expert_ids.dim() != 2 or expert_ids.size(0) != x.size(0):
            raise ValueError(
                f"x is {list(x.shape)}, expert_ids is {list(expert_ids.shape)}; they must be [T, H] and [T, topk]"
            )
        require_dtype("x", x, tuple(FORMATS))
        require_dtype("expert_ids", expert_ids, (torch.int32, torch.int64))
        require_same_device("expert_ids", expert_ids, "x", x)
        require_tensor("router_weights", router_weights, optional=True)
        require_weight_of_each_slot(router_weights, expert_ids)
        if router_weights is not None:
            require_dtype("router_weights", router_weights, tuple(dict.fromkeys((torch.float32, x.dtype))))
            require_same_device("router_weights", router_weights, "x", x)

    def send(
        self, x: Tensor, expert_ids: Tensor, router_weights: Tensor | None, *, weights_travel: bool,
        experts_train: bool = False,
    ) -> Dispatched:  # fmt: skip
        """`dispatch` of arguments that were checked. With `weights_travel` rows bring their router weights."""
        sending = self._sending(expert_ids)
        settings = {**self._asked, **_settings(x, expert_ids, router_weights, weights_travel, experts_train)}
        arriving = self._exchange(sending.counts, sending.note, number_of(settings))
        splits, pairs = self._splits(sending, arriving, settings)
        order = order_of(sending, sum(splits.sent), not self.unique, self.rows_per_peer is not None)
        rows, row_weights, *indices = Sent.apply(  # type: ignore[no-untyped-call]
            splits, x, router_weights if weights_travel else None,
            None if self.unique else arriving[:, : self.experts_here], *order,
        )  # fmt: skip
        kept_weights = None if weights_travel else router_weights
        if self.unique:
            ids = splits.forth(ids_at_target(expert_ids, order, self.experts_here))
            most = ids.numel() if pairs is None else pairs  # a token may name one expert several times
            return Dispatched(rows, ids, row_weights, max_rows=most, state=_State(splits, order, kept_weights))
        ids, m_sizes, gather_indices = indices
        return Dispatched(rows, ids, row_weights, state=_State(splits, order, kept_weights, m_sizes, gather_indices))

    def _sending(self, expert_ids: Tensor) -> Sending:
        room = self.rows_per_peer
        if self.unique:
            sending = once_per_rank(expert_ids, self.num_experts, self.ranks)
        else:
            sending = once_per_slot(expert_ids, self.num_experts, self.ranks, room is not None)
        return sending if room is None else with_room(sending, room)

    def _exchange(self, counts: Tensor, note: Tensor | None, number: int) -> Tensor:
        """[ranks, counts, note and number]: what each rank tells every other before rows travel."""
        if counts.size(1) < self.width:
            counts = torch.nn.functional.pad(counts, (0, self.width - counts.size(1)))
        notes = [] if note is None else [note.unsqueeze(1)]
        numbers = counts.new_full((self.ranks, 2 - len(notes)), number)  # in place of a note, too, that nobody reads
        return equal_splits(self.group, 1).forth(torch.cat([counts, *notes, numbers], 1))

    def _splits(self, sending: Sending, arriving: Tensor, settings: Settings) -> tuple[Splits, int | None]:
        """And how many (row, expert) pairs come, where that is known."""
        if self.rows_per_peer is not None:
            self._note_overflow(arriving[:, -2])
            if self._compares(arriving):
                require_agreement(self.group, settings, arriving[:, -1].tolist())
                if _checks():
                    self.check()
            return equal_splits(self.group, self.rows_per_peer), None
        # The one wait of a call.
        sent, received, pairs, numbers = torch.stack(
            [sending.counts.sum(1), arriving[:, :-2].sum(1), arriving[:, -2], arriving[:, -1]]
        ).tolist()
        if not torch.compiler.is_compiling():
            require_agreement(self.group, settings, numbers)
        return Splits(self.name, sent, received, self.mirrored), sum(pairs)

    def _compares(self, arriving: Tensor) -> bool:
        """Whether a call without splits of its own looks at the others' numbers, which waits for a GPU: at the first
        one, and with MOEGEMM_CHECK."""
        if torch.compiler.is_compiling() or type(arriving) is not Tensor or arriving.is_meta:
            return False
        first, self._compared = not self._compared, True
        return first or not arriving.is_cuda or _checks()

    def _note_overflow(self, left_out: Tensor) -> None:
        if self.overflow is None or self.overflow.device != left_out.device:
            self.overflow = torch.zeros_like(left_out)
        torch.maximum(self.overflow, left_out, out=self.overflow)

    def check(self) -> None:
        """Waits for the device and raises, on every rank alike, if rows did not fit since the dispatcher was made."""
        if self.overflow is None:
            return
        for rank, rows in enumerate(self.overflow.tolist()):
            if rows:
                raise ValueError(
                    f"rows_per_peer is {self.rows_per_peer}; rank {rank} had up to {self.rows_per_peer + rows} rows "
                    "for one rank, and left those out that did not fit"
                )

    def refuse(self, error: Exception, x: object) -> None:
        """Takes part in the exchange of counts with a refusal, so that no rank waits for this one."""
        arriving = self._exchange_nothing(REFUSED, x)
        if arriving is not None and (self.rows_per_peer is None or self._compares(arriving)):
            tell_refusal(self.group, error)

    def agree(self, settings: Settings, x: object) -> None:
        """Takes part in it with settings, and raises on every rank unless all of them do so with the same ones."""
        arriving = self._exchange_nothing(number_of(settings), x)
        if arriving is not None:
            require_agreement(self.group, settings, arriving[:, -1].tolist())

    def _exchange_nothing(self, number: int, x: object) -> Tensor | None:
        """For a rank that has no rows to tell of; None where nothing is exchanged."""
        device = x.device if isinstance(x, Tensor) else device_for(self.group)
        if self.mirrored or device.type == "meta" or torch.compiler.is_compiling():
            return None
        nothing = torch.zeros(self.ranks, self.width, dtype=torch.int64, device=device)
        return self._exchange(nothing, nothing[:, 0], number)


def _checks() -> bool:
    return os.environ.get("MOEGEMM_CHECK") == "1"


def _settings(
    x: Tensor, expert_ids: Tensor, router_weights: Tensor | None, weights_travel: bool, experts_train: bool
) -> Settings:
    """What all ranks must have in common for their exchanges to meet, forward and backward."""
    records = torch.is_grad_enabled()
    weights_train = router_weights is not None and router_weights.requires_grad
    return {
        "the width of x": int(x.size(1)),
        "the dtype of x": str(x.dtype),
        "topk": int(expert_ids.size(1)),
        "the dtype of expert_ids": str(expert_ids.dtype),
        "the dtype of router_weights": None if router_weights is None else str(router_weights.dtype),
        "requires_grad of x": records and x.requires_grad,
        "requires_grad of router_weights": records and weights_train,
        "requires_grad of the experts": records and experts_train,
        "travelling of router weights": weights_travel,
    }
