"""Round robin: all contenders of a case take turns, so that clocks and temperature hit them alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_cuda: Any = torch.cuda
Calls = Mapping[str, Callable[[], object]]

# Five times the 50 MB of L2: whatever a call left there is gone. On a CPU, once around a large last-level cache.
FLUSH_BYTES = 256 << 20
CPU_FLUSH_BYTES = 32 << 20
# Launching the copies of a small case takes the host longer than running them takes the GPU. Spinning for 100
# microseconds (at up to 2 GHz) before each call lets the host get ahead, so that events see GPU time only.
SPIN_CYCLES = 200_000
SPIN_BELOW_FLOPS = 5e10
# Power limits larger cases, so that the time of a launch depends on how idle the card was before it, and an expert
# loop waits for the host. 2 ms of dense products before each launch put all contenders at the clock of a card at work,
# and let the host get ahead. Cases that take several milliseconds themselves keep the card at work.
LOAD_PRODUCTS = 3
LOAD_BELOW_FLOPS = 2e12
WARM_UP_ROUNDS = 3
WARM_UP_SECONDS = 0.05  # the power limit needs this long to pull the clock down


class Clock:
    """Times calls on one device."""

    def __init__(self, device: str, *, flush: bool = True) -> None:
        """Without `flush` a call finds in the caches what the ones before it left there."""
        self.cuda = device == "cuda"
        flush_bytes = FLUSH_BYTES if self.cuda else CPU_FLUSH_BYTES
        self._flush = torch.empty(flush_bytes if flush else 0, dtype=torch.int8, device=device)
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def heat(self, seconds: float) -> None:
        """Brings a cool card, which runs 10 to 15% faster, to the state that every case is measured in."""
        if not self.cuda or seconds <= 0:
            return
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            self._multiply(40)
            torch.cuda.synchronize()

    def round_robin(
        self, calls: Calls, rounds: int, flops: float = 0.0, warm_up: bool = True
    ) -> dict[str, list[float]]:
        """Milliseconds of each call: one launch of each per round, in an order drawn anew, L2 flushed before each."""
        order = list(calls)
        shuffle = random.Random(rounds).shuffle
        marks: list[tuple[str, Any, Any]] = []
        if warm_up:
            self._warm_up(calls, flops)
        for _ in range(rounds):
            shuffle(order)
            marks += [(name, *self._time(calls[name], flops)) for name in order]
        self.synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for name, begin, end in marks:
            times[name].append(begin.elapsed_time(end) if self.cuda else (end - begin) * 1e3)
        return times

    def _warm_up(self, calls: Calls, flops: float) -> None:
        until = time.monotonic() + (WARM_UP_SECONDS if self.cuda else 0)
        done = 0
        while done < (WARM_UP_ROUNDS if self.cuda else 1) or time.monotonic() < until:
            for call in calls.values():
                self._time(call, flops)
            self.synchronize()
            done += 1

    def _time(self, call: Callable[[], object], flops: float) -> tuple[Any, Any]:
        if not self.cuda:
            self._flush.zero_()
            begin = time.perf_counter()
            call()
            return begin, time.perf_counter()
        started, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
        if SPIN_BELOW_FLOPS <= flops < LOAD_BELOW_FLOPS:
            self._multiply(LOAD_PRODUCTS)
        self._flush.zero_()
        if flops < SPIN_BELOW_FLOPS:
            _cuda._sleep(SPIN_CYCLES)
        started.record()
        call()
        ended.record()
        return started, ended

    def _multiply(self, products: int) -> None:
        """Dense products of 0.7 ms each."""
        if self._dense is None:
            rows, columns = (torch.randn(n, 8192, device="cuda", dtype=torch.bfloat16) for n in (4096, 8192))
            self._dense = rows, columns
        for _ in range(products):
            torch.mm(self._dense[0], self._dense[1].t())

    def repeated(self, call: Callable[[], object], repeats: int, rounds: int) -> list[float]:
        """Milliseconds of one call out of `repeats` in a CUDA graph: launch gaps hardly count."""
        if not self.cuda:
            return self.round_robin({"call": call}, rounds)["call"]
        times = self.round_robin({"graph": captured(call, repeats)}, rounds)["graph"]
        return [t / repeats for t in times]


def captured(call: Callable[[], object], repeats: int = 1) -> Callable[[], object]:
    """A replay of so many calls as one CUDA graph: what the host takes for them does not count."""
    side = _cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    replay: Callable[[], object] = graph.replay
    return replay


def copy_bytes_per_s(clock: Clock, device: str) -> float:
    """What memory gives and takes when a large tensor is copied: the slope of the roofline."""
    count = (1 << 30) if clock.cuda else (128 << 20)
    source = torch.zeros(count, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = clock.round_robin({"copy": lambda: target.copy_(source)}, 9)["copy"]
    return 2 * count / statistics.median(times) * 1e3


def spread(times: list[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile, in milliseconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "ms": statistics.median(ordered),
        "ms_p10": ordered[round(0.1 * last)],
        "ms_p90": ordered[round(0.9 * last)],
    }
