"""One rank whose call cannot go on: the others get an error that names the cause, and wait for nobody."""

from collections.abc import Callable

import moegemm
import pytest
import torch
import torch.distributed as dist
from distributed.test_dispatchers import refusal
from moegemm.distributed import AllToAll, expert_parallel_mlp

EXPERTS, HIDDEN, INNER = 4, 32, 64  # experts of each rank
NO_TENSOR = "TypeError: w_down is None; a torch.Tensor is accepted"
FROZEN = "a quantised weight is frozen and has no gradient"


class Call:
    """expert_parallel_mlp on a group of its own, with arguments that every rank accepts unless told otherwise."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.group = dist.new_group()
        self.odd = dist.get_rank() == dist.get_world_size() - 1
        self.x = torch.randn(5, HIDDEN, generator=random)
        self.ids = torch.randint(0, EXPERTS * dist.get_world_size(), (5, 2), generator=random)
        self.w_gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random)
        self.w_down = torch.randn(EXPERTS, HIDDEN, INNER, generator=random)

    def __call__(self, **changed):
        given = {"w_gate_up": self.w_gate_up, "w_down": self.w_down, **changed}
        if "dispatcher" not in given:
            given = {"mesh": self.group, **given}
        return expert_parallel_mlp(self.x, expert_ids=self.ids, router_weights=None, **given)

    def experts(self, count: int) -> dict:
        return {"w_gate_up": self.w_gate_up[:count], "w_down": self.w_down[:count]}


def without_w_down(call: Call) -> None:
    call(w_down=None if call.odd else call.w_down)


def without_w_down_later(call: Call) -> None:
    call()
    without_w_down(call)


def both(call: Call) -> None:
    dispatcher = AllToAll(call.group, EXPERTS * dist.get_world_size())
    call(dispatcher=dispatcher, **({"mesh": call.group} if call.odd else {}))


def fewer_experts(call: Call) -> None:
    call()
    call(**call.experts(3 if call.odd else EXPERTS))


def another_layers_experts(call: Call) -> None:
    call()
    call(**call.experts(2))
    call(**call.experts(2 if call.odd else EXPERTS))


def without_main_grad(call: Call) -> None:
    for w in (call.w_gate_up, call.w_down):
        w.requires_grad_()
        w.main_grad = None if call.odd else torch.zeros_like(w)
    call(accumulate=True)


def frozen_with_a_queue(call: Call) -> None:
    w_down = moegemm.quantize(call.w_down, "int4") if call.odd else call.w_down.requires_grad_()
    call(w_gate_up=call.w_gate_up.requires_grad_(), w_down=w_down, weight_gradients=moegemm.WeightGradients())


def scale_in_words(call: Call) -> None:
    call(w_gate_up=call.w_gate_up.requires_grad_(), gradient_scale="half" if call.odd else 0.5)


def trained_by_one(call: Call) -> None:
    dispatcher = AllToAll(call.group, EXPERTS * dist.get_world_size(), unique=True)
    call(w_gate_up=call.w_gate_up.requires_grad_(call.odd), dispatcher=dispatcher)


def dispatched_ids(call: Call) -> None:
    dispatcher = AllToAll(call.group, EXPERTS * dist.get_world_size())
    dispatcher.dispatch(call.x, call.ids.float() if call.odd else call.ids, None)


def another_room(call: Call) -> None:
    dispatchers = [AllToAll(call.group, EXPERTS * dist.get_world_size(), rows_per_peer=room) for room in (None, 20)]
    call(dispatcher=dispatchers[call.odd])


def another_way(call: Call) -> None:
    dispatchers = [AllToAll(call.group, EXPERTS * dist.get_world_size(), unique=unique) for unique in (False, True)]
    call(dispatcher=dispatchers[call.odd])


# What the last rank does otherwise, and what every rank is told.
CASES: list[tuple[Callable[[Call], None], str]] = [
    (without_w_down, NO_TENSOR),
    (without_w_down_later, NO_TENSOR),
    (both, "ValueError: mesh and dispatcher are both given; give one of them"),
    (fewer_experts, "num_experts is 8 on rank 0, 6 on rank 1"),
    (another_layers_experts, "num_experts is 8 on rank 0, 4 on rank 1"),
    (without_main_grad, "ValueError: w_gate_up.main_grad is None"),
    (frozen_with_a_queue, FROZEN),
    (scale_in_words, "TypeError: gradient_scale is 'half' of type str; a number is accepted"),
    (trained_by_one, "requires_grad of the experts is False on rank 0, True on rank 1"),
    (another_room, "rows_per_peer is None on rank 0, 20 on rank 1"),
    (another_way, "unique is False on rank 0, True on rank 1"),
    (dispatched_ids, "TypeError: expert_ids has dtype torch.float32"),
]


def told(run: Callable[[Call], None]) -> tuple[str, bool]:
    """What this rank is told, and whether the next call has the bits of a group where nothing went wrong."""
    call, untouched = Call(), Call()
    message = refusal(lambda: run(call))
    with torch.no_grad():
        return message, torch.equal(call(), untouched())


@pytest.mark.parametrize(("run", "cause"), CASES, ids=[run.__name__ for run, _ in CASES])
def test_every_rank_is_told_what_one_rank_cannot_do(ranks, run, cause):
    for message, goes_on in ranks(2).run(told, run):
        assert cause in message
        assert goes_on


def numbers_of_experts() -> list[bool]:
    """Layers with different numbers of experts share a group: each has the bits that it has on a group of its own."""
    call = Call()
    shared = [call(**call.experts(count)) for count in (2, 4, 3, 2, 4)]
    alone = []
    for count in (2, 4, 3, 2, 4):
        other = Call()
        alone.append(other(**other.experts(count)))
    return [torch.equal(a, b) for a, b in zip(shared, alone, strict=True)]


def test_layers_with_other_numbers_of_experts_share_a_group(ranks):
    assert ranks(2).run(numbers_of_experts) == [[True] * 5] * 2
