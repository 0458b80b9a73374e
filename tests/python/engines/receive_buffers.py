"""What dispatchers of expert parallelism leave in the memory of one rank, from the tokens of all of them.

Each emulator sends the slots of the rank's experts as the dispatcher lays them out, runs the layer on that and brings
the results home. Whatever the dispatcher leaves unwritten is NaN, or garbage where it is an index, and the gradient
that comes back has NaN there too.
"""

from dataclasses import dataclass, field
from typing import Any

import moegemm
import torch
from torch import Tensor

ALIGNMENTS = (1, 8, 16, 128, 256)
LOCAL = 4  # experts of the rank
FIRST = 3  # the first of them among all
EXPERTS = 9


class Sent(torch.autograd.Function):
    """Rows of `x` written to some places of a buffer of `rows` rows. The gradient is read there and nowhere else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(source, place)
        ctx.shape = x.shape
        buffer = torch.full((rows, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
        buffer[place] = x[source]
        return buffer

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        source, place = ctx.saved_tensors
        d_x = torch.zeros(ctx.shape, dtype=torch.float32, device=gradient.device)
        return d_x.index_add(0, source, gradient[place].float()).to(gradient.dtype), None, None, None


class Fetched(torch.autograd.Function):
    """Some rows of a buffer, read where they are. The gradient of all others is NaN."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = buffer.shape
        return buffer[place]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        d_buffer = torch.full(ctx.shape, float("nan"), dtype=gradient.dtype, device=gradient.device)
        d_buffer[place] = gradient
        return d_buffer, None


@dataclass
class Batch:
    """The tokens of all ranks, rank after rank, and the weights of this rank's experts."""

    x: Tensor  # [T, H]
    expert_ids: Tensor  # [T, topk], of all experts
    router_weights: Tensor  # [T, topk]
    experts: dict[str, Tensor | None]  # arguments of the layers
    ranks: int
    options: dict[str, Any] = field(default_factory=dict)  # more of them

    def local_ids(self) -> Tensor:
        """[T, topk]: the expert on this rank, or -1."""
        ids = self.expert_ids - FIRST
        return torch.where((ids >= 0) & (ids < LOCAL), ids, -1)

    def slots(self) -> tuple[Tensor, Tensor]:
        """Flat slots of this rank's experts, by expert and then in order, and how many each expert has."""
        ids = self.local_ids().flatten()
        order = torch.where(ids < 0, LOCAL, ids).sort(stable=True).indices
        sizes = torch.bincount(ids[ids >= 0], minlength=LOCAL)
        return order[: int(sizes.sum())], sizes

    def home(self, slots: Tensor, rows: Tensor) -> Tensor:
        """Each token's rows, added up."""
        tokens = slots // self.expert_ids.size(1)
        total = torch.zeros(self.x.shape, dtype=torch.float32, device=rows.device)
        return total.index_add(0, tokens, rows.float()).to(rows.dtype)


def aligned(value: Tensor, alignment: int) -> Tensor:
    return (value + alignment - 1) // alignment * alignment


def places_of(starts: Tensor, sizes: Tensor) -> Tensor:
    """Where the slots of Batch.slots go in segments that begin at `starts`."""
    within = torch.arange(int(sizes.sum()), device=sizes.device)
    before = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return torch.repeat_interleave(starts, sizes) + within - before


def expert_major(
    batch: Batch, layout: dict[str, Tensor], starts: Tensor, sizes: Tensor, rows: int, weighted: bool, tails: str
) -> Tensor:
    """Rows where `starts` and `sizes` say, run by experts_mlp as `layout` tells it. Weights go with the rows and are
    multiplied in the experts, or stay at home."""
    slots, _ = batch.slots()
    place = places_of(starts, sizes)
    topk = batch.expert_ids.size(1)
    received = Sent.apply(batch.x, slots // topk, place, rows)
    weights = Sent.apply(batch.router_weights.flatten(), slots, place, rows) if weighted else None
    buffer = torch.full((rows, batch.x.size(1)), 77.0, dtype=batch.x.dtype, device=batch.x.device)
    result = moegemm.experts_mlp(
        received, sizes=layout["sizes"], starts=layout.get("starts"), row_weights=weights, tails=tails, out=buffer,
        **batch.experts, **batch.options,
    )  # fmt: skip
    outside = torch.ones(rows, dtype=torch.bool, device=place.device)
    outside[place] = False
    assert (result[outside] == (77.0 if tails == "undefined" else 0.0)).all()
    home = Fetched.apply(result, place)
    if not weighted:
        home = home * batch.router_weights.flatten()[slots].unsqueeze(1).to(home.dtype)
    return batch.home(slots, home)


def compact(batch: Batch, capacity: int, garbage_ids: bool, **options: Any) -> Tensor:
    """Every token that has a local slot, once, with its ids and weights; a token's rows are added in the layer."""
    ids = batch.local_ids()
    tokens = torch.where((ids >= 0).any(1))[0]
    count = len(tokens)
    place = torch.arange(count, device=ids.device)
    received = Sent.apply(batch.x, tokens, place, capacity)
    weights = Sent.apply(batch.router_weights, tokens, place, capacity)
    low, high = (-(2**31), 2**31) if garbage_ids else (-1, 0)
    received_ids = torch.randint(low, high, (capacity, ids.size(1)), device=ids.device)
    if garbage_ids and capacity > count:
        received_ids[count:, 0] = 2  # a local expert: only the count says that it is garbage
    received_ids[:count] = ids[tokens]
    result = moegemm.moe_mlp(
        received, expert_ids=received_ids, router_weights=weights, **batch.experts, **batch.options, **options
    )
    out = torch.zeros(batch.x.shape, dtype=result.dtype, device=result.device)
    return out.index_add(0, tokens, Fetched.apply(result, place))


def most_tokens(batch: Batch) -> int:
    """More than any batch of a rank has: what buffers are allocated for."""
    return len(batch.x) + 5


def deepep_v1(batch: Batch, alignment: int, tails: str) -> Tensor:
    """Buffer.dispatch: compact rows. The host knows how many there are."""
    ids = batch.local_ids()
    return compact(batch, int((ids >= 0).any(1).sum()), False, max_rows=int((ids >= 0).sum()))


def deepep_v1_worst_case(batch: Batch, alignment: int, tails: str) -> Tensor:
    """The same with num_worst_tokens: nobody asks the host; ids past the received tokens are -1."""
    return compact(batch, most_tokens(batch), False, max_rows=batch.expert_ids.numel())


def deepep_v1_low_latency(batch: Batch, alignment: int, tails: str) -> Tensor:
    """[E, ranks * most tokens, H] and recv_count; weights stay at home."""
    return masked(batch, tails, weighted=False)


def masked(batch: Batch, tails: str, weighted: bool) -> Tensor:
    slots, sizes = batch.slots()
    capacity, hidden = most_tokens(batch), batch.x.size(1)
    starts = torch.arange(LOCAL, device=sizes.device) * capacity
    place = places_of(starts, sizes)
    topk = batch.expert_ids.size(1)
    rows = Sent.apply(batch.x, slots // topk, place, LOCAL * capacity).view(LOCAL, capacity, hidden)
    weights = None
    if weighted:
        weights = Sent.apply(batch.router_weights.flatten(), slots, place, LOCAL * capacity).view(LOCAL, capacity)
    result = moegemm.experts_mlp(
        rows, sizes=sizes.int(), row_weights=weights, tails=tails, expected_rows=len(slots), **batch.experts,
        **batch.options,
    )  # fmt: skip
    assert result.shape == rows.shape
    home = Fetched.apply(result.view(-1, hidden), place)
    if not weighted:
        home = home * batch.router_weights.flatten()[slots].unsqueeze(1).to(home.dtype)
    return batch.home(slots, home)


def deepep_v2_compact(batch: Batch, alignment: int, tails: str) -> Tensor:
    """do_cpu_sync=False: rows from psum_num_recv_tokens_per_scaleup_rank[-1] on are uninitialised, their ids too."""
    received = (batch.local_ids() >= 0).any(1)
    per_rank = torch.stack([part.sum() for part in received.tensor_split(batch.ranks)])
    psum = per_rank.cumsum(0).int()
    return compact(batch, most_tokens(batch), True, num_tokens=psum[-1])


def deepep_v2_expanded(batch: Batch, alignment: int, tails: str) -> Tensor:
    """do_expand=True: psum[e] is the aligned start of expert e and its count, and weights come with the rows."""
    _, sizes = batch.slots()
    starts = aligned(sizes, alignment).cumsum(0) - aligned(sizes, alignment)
    psum = starts + sizes
    # What a caller has is psum: each segment begins at the next multiple after the end of the one before.
    told = torch.cat((psum.new_zeros(1), aligned(psum[:-1], alignment)))
    rows = int(aligned(sizes, alignment).sum()) + alignment
    return expert_major(batch, {"sizes": psum - told, "starts": told}, starts, sizes, rows, True, tails)


def hybrid_ep(batch: Batch, alignment: int, tails: str) -> Tensor:
    """dispatch_with_permute: packed rows with probabilities and counts, in a buffer of num_permuted_tokens."""
    slots, sizes = batch.slots()
    starts = sizes.cumsum(0) - sizes
    return expert_major(batch, {"sizes": sizes.int()}, starts, sizes, len(slots) + 3 * alignment, True, tails)


def hybrid_ep_padded(batch: Batch, alignment: int, tails: str) -> Tensor:
    """The same with pad_multiple: segments are padded, and the counts that a caller needs are those without padding."""
    _, sizes = batch.slots()
    padded = aligned(sizes, alignment)
    starts = padded.cumsum(0) - padded
    layout = {"sizes": sizes, "starts": starts}
    return expert_major(batch, layout, starts, sizes, int(padded.sum()), True, tails)


def nccl_ep_flat(batch: Batch, alignment: int, tails: str) -> Tensor:
    """High throughput, flat: compact rows of a static buffer, -1 in the ids of those that are not there."""
    return compact(batch, most_tokens(batch), False, max_rows=batch.expert_ids.numel())


def nccl_ep_expert_major(batch: Batch, alignment: int, tails: str) -> Tensor:
    """High throughput, expert-major: expert_offsets [E + 1] of padded segments, and real counts."""
    _, sizes = batch.slots()
    padded = aligned(sizes, alignment)
    offsets = torch.cat((padded.new_zeros(1), padded.cumsum(0))).int()
    layout = {"sizes": sizes.int(), "starts": offsets[:-1]}
    return expert_major(batch, layout, offsets[:-1].long(), sizes, int(offsets[-1]) + 64, True, tails)


def nccl_ep_low_latency(batch: Batch, alignment: int, tails: str) -> Tensor:
    """[E, most tokens, H] and counts, with weights of the rows."""
    return masked(batch, tails, weighted=True)


def all_to_all_vdev_2d(batch: Batch, alignment: int, tails: str) -> Tensor:
    """out_splits_offsets [2, E * ranks]: what came from each rank for each expert, and where it begins. Segments begin
    at multiples of major_align, and an empty expert takes one."""
    slots, sizes = batch.slots()
    room = aligned(sizes, alignment).clamp(min=alignment)
    starts = room.cumsum(0) - room
    tokens = slots // batch.expert_ids.size(1)
    ranks = tokens // -(-len(batch.x) // batch.ranks)
    owners = torch.repeat_interleave(torch.arange(LOCAL, device=sizes.device), sizes)
    splits = torch.bincount(owners * batch.ranks + ranks, minlength=LOCAL * batch.ranks).view(LOCAL, batch.ranks)
    offsets = starts.unsqueeze(1) + splits.cumsum(1) - splits
    out_splits_offsets = torch.stack((splits.flatten(), offsets.flatten()))  # int64, on the device
    told = out_splits_offsets.view(2, LOCAL, batch.ranks)
    layout = {"sizes": told[0].sum(1), "starts": told[1, :, 0]}
    return expert_major(batch, layout, starts, sizes, int(room.sum()) + 2 * alignment, False, tails)


ENGINES = {
    "DeepEP v1": deepep_v1,
    "DeepEP v1, worst case": deepep_v1_worst_case,
    "DeepEP v1, low latency": deepep_v1_low_latency,
    "DeepEP v2, compact": deepep_v2_compact,
    "DeepEP v2, expanded": deepep_v2_expanded,
    "HybridEP": hybrid_ep,
    "HybridEP, padded": hybrid_ep_padded,
    "NCCL EP, flat": nccl_ep_flat,
    "NCCL EP, expert-major": nccl_ep_expert_major,
    "NCCL EP, low latency": nccl_ep_low_latency,
    "torch, all_to_all_vdev_2d": all_to_all_vdev_2d,
}
EXPERT_MAJOR = [name for name, engine in ENGINES.items() if engine.__code__.co_name in (
    "deepep_v2_expanded", "hybrid_ep", "hybrid_ep_padded", "nccl_ep_expert_major", "all_to_all_vdev_2d")]  # fmt: skip
