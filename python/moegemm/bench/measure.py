"""The measuring loop: case after case until the list or the time is used up."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moegemm.bench import contenders
from moegemm.bench.cases import Case
from moegemm.bench.contenders import Contender, KernelList, KernelReplacedError
from moegemm.bench.operands import Operands, SharedWeights, bytes_needed, make_operands
from moegemm.bench.peers import Peers, first_line
from moegemm.bench.progress import Progress
from moegemm.bench.timing import Clock, spread
from moegemm.formats import FORMATS

DTYPES = {known.name: dtype for dtype, known in FORMATS.items()}


class DeviceLostError(Exception):
    """The GPU reported an error after which nothing more can run in this process."""


@dataclass
class Settings:
    device: str
    dtype: torch.dtype
    rounds: int
    all_kernels: bool
    peers: Peers | None
    deadline: float  # of time.monotonic()


class Measurement:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._kernels = KernelList(settings.device) if settings.all_kernels else None
        self._peers = settings.peers.found if settings.peers else {}
        self._weights = SharedWeights(settings.device, settings.dtype)

    def run(self, cases: Sequence[Case], keep: Callable[[dict[str, Any]], None]) -> int:
        """Hands each finished case to `keep`; returns how many cases the time did not reach."""
        slowest = 0.0
        with Progress(len(cases)) as progress:
            for done, case in enumerate(cases):
                begin = time.monotonic()
                if begin + slowest > self._settings.deadline:
                    return len(cases) - done
                entry = self.measure(case)
                keep(entry)
                progress.step(f"{case}: {outcome(entry)}")
                slowest = max(slowest, time.monotonic() - begin)
                if entry.get("device_lost"):
                    raise DeviceLostError(f"{case}: the GPU cannot be used any more")
        return 0

    def measure(self, case: Case) -> dict[str, Any]:
        _, n, k = case.model.weight_shape(case.op)
        entry: dict[str, Any] = {
            "model": case.model.name,
            "tokens": case.tokens,
            "routing": case.routing,
            "op": case.op,
            "rows": case.rows,
            "n": n,
            "k": k,
            "flops": case.flops,
            "contenders": {},
        }
        missing = self._weights.missing_bytes(case)
        if missing > 0:
            needed = bytes_needed(case)
            return entry | {"skipped": f"needs {needed / 2**30:.0f} GiB, {missing / 2**30:.0f} more than are free"}
        device, dtype = self._settings.device, self._settings.dtype
        try:
            operands = make_operands(case, self._weights.of(case), device, dtype, seed=case.tokens)
        except torch.OutOfMemoryError as error:
            return entry | {"skipped": first_line(error)}
        touched = sum(size > 0 for size in operands.routing.sizes)
        entry |= {
            "touched_experts": touched,
            "largest_expert_rows": max(operands.routing.sizes),
            "weight_bytes": touched * n * k * operands.out.element_size(),
        }
        try:
            self._compete(case, operands, entry)
        finally:
            del operands
            gc.collect()
        return entry

    def _compete(self, case: Case, operands: Operands, entry: dict[str, Any]) -> None:
        results: dict[str, dict[str, Any]] = entry["contenders"]
        ready: dict[str, Contender] = {}
        for name, make in self._makers(case, operands).items():
            try:
                contender = make()
                results[name] = contenders.check(contender)
                self._clock.synchronize()
            except KernelReplacedError:
                assert self._kernels is not None
                self._kernels.forget(case, name)
            except Exception as error:  # whatever a peer raises is its result
                if name == "ours" and not isinstance(error, RuntimeError | ValueError):
                    raise
                results[name] = {"correct": False, "failure": first_line(error)}
                if self._device_lost():
                    entry["device_lost"] = True
                    return
            else:
                ready[name] = contender
        try:
            times = self._clock.round_robin({n: c.run for n, c in ready.items()}, self._settings.rounds, case.flops)
            for name, measured in times.items():
                results[name] |= spread(measured)
            self._check_again(ready, results)
        except RuntimeError as error:
            entry["skipped"] = first_line(error)
            entry["device_lost"] = self._device_lost()

    def _check_again(self, ready: dict[str, Contender], results: dict[str, dict[str, Any]]) -> None:
        """What ours leaves after many launches close together must be as right as its first result."""
        if "ours" not in ready:
            return
        ours = ready["ours"]
        error = ours.error(ours.run())
        if not error <= results["ours"]["error_limit"]:
            results["ours"] |= {"correct": False, "fault": f"error {error:.2g} after the timed rounds"}

    def _makers(self, case: Case, operands: Operands) -> dict[str, Callable[[], Contender]]:
        makers: dict[str, Callable[[], Contender]] = {
            "dense": lambda: contenders.dense(operands),
            "torch": lambda: contenders.torch_with_copies(operands),
            "loop": lambda: contenders.expert_loop(operands),
            "ours": lambda: contenders.ours(operands),
        }
        for name, peer in self._peers.items():
            if case.op in peer.ops:
                makers[name] = partial(peer.make, operands)
        if self._kernels is not None:
            for name, numbers in self._kernels.of(case).items():
                makers[name] = partial(contenders.ours, operands, numbers)
        return makers

    def _device_lost(self) -> bool:
        try:
            self._clock.synchronize()
        except RuntimeError:
            return True
        return False


def outcome(entry: dict[str, Any]) -> str:
    if entry.get("skipped"):
        return f"skipped: {entry['skipped']}"
    words = []
    for name, contender in entry["contenders"].items():
        if "failure" in contender:
            words.append(f"{name} FAILED ({contender['failure']})")
        elif not contender["correct"]:
            words.append(f"{name} WRONG ({contender.get('fault') or contender['error']})")
        elif "ms" in contender:
            words.append(f"{name} {contender['ms']:.4f} ms {entry['flops'] / contender['ms'] * 1e-9:.3g} TF")
    return ", ".join(words)
