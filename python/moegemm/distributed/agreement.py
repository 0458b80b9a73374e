"""Ranks that do not agree get an error on every one of them, which names the cause, instead of waiting for each other.

Each exchange of counts carries a number that stands for what its rank asks for. Every rank sees the numbers of all
others, so either all go on or all stop; those that stop tell each other why.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from moegemm.distributed.exchange import is_fake

REFUSED = -1  # in place of a number: the rank's own arguments were refused

Settings = Mapping[str, object]


def _number_of_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


_number_of_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # while tracing, not in the graph


def number_of(settings: Settings) -> int:
    """The same for the same settings, in every process."""
    return _number_of_text(";".join([f"{name}={value}" for name, value in settings.items()]))


def _everyone(group: dist.ProcessGroup, mine: object) -> list[object]:
    found: list[object] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def _ranks(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _disagreement(found: Sequence[object]) -> str:
    refusals = {rank: text for rank, text in enumerate(found) if isinstance(text, str)}
    if refusals:
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in refusals.items())
        return f"{_ranks(list(refusals))} of the expert-parallel group refused its arguments: {reasons}"
    settings = [s for s in found if isinstance(s, Mapping)]
    for name in settings[0]:
        ranks_of: dict[object, list[int]] = {}
        for rank, other in enumerate(settings):
            ranks_of.setdefault(other.get(name), []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            return f"{name} is {values}; all ranks of an expert-parallel group must agree"
    return "the ranks of the expert-parallel group disagree"


def require_agreement(group: dist.ProcessGroup, mine: Settings, numbers: Sequence[int]) -> None:
    """Raises on every rank if the `numbers` of all ranks differ; `mine` is what this rank's stands for."""
    if all(number == numbers[0] for number in numbers) and numbers[0] != REFUSED:
        return
    raise ValueError(_disagreement(_everyone(group, dict(mine))))


def tell_refusal(group: dist.ProcessGroup, error: Exception) -> None:
    """The other ranks' `require_agreement` gets this rank's reason."""
    _everyone(group, f"{type(error).__name__}: {error}")


def agree_on(group: dist.ProcessGroup, settings: Settings, refusal: Exception | None) -> None:
    """A collective of its own: raises on every rank if one refuses, or if their settings differ."""
    if is_fake(group):
        found: list[object] = [dict(settings)]
    else:
        found = _everyone(group, dict(settings) if refusal is None else f"{type(refusal).__name__}: {refusal}")
    if refusal is not None:
        raise refusal
    if any(other != found[0] for other in found) or isinstance(found[0], str):
        raise ValueError(_disagreement(found))


def device_for(group: dist.ProcessGroup) -> torch.device:
    """Where a message lies that no tensor of the caller gives a device."""
    kinds = {kind.type for kind in group._device_types}
    if kinds == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
