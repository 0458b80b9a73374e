"""Time of one tiny call (E = 4, 8 rows, N = K = 64) next to torch.mm of that size, both with gradients; and what the
call takes without gradients, and with gradients and permuted rows (topk 2).

Of the call with gradients at most 3 times torch.mm is promised on the CPU, where the whole call counts, and at most
15 microseconds on a GPU, where the host's time counts. `--check` exits with 1 when a promise is broken.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

try:
    import moegemm
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm

CPU_RATIO_LIMIT = 3.0
GPU_HOST_LIMIT_US = 15.0


def microseconds(call: Callable[[], object], calls: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return elapsed / calls * 1e6


# The call that is promised has gradients; the others show what they cost.
PROMISED = "with gradients"
DENSE = "torch.mm"


class Case:
    """One device and dtype with its contenders."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = str(dtype).removeprefix("torch.")
        X = torch.randn(8, 64, device=device, dtype=dtype, requires_grad=True)
        W = torch.randn(4, 64, 64, device=device, dtype=dtype, requires_grad=True)
        dense = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
        m_sizes = torch.full((4,), 2, device=device, dtype=torch.int32)
        tokens, gather = X.detach()[:4].requires_grad_(), torch.arange(8, device=device, dtype=torch.int32)
        x, w = X.detach(), W.detach()
        self.contenders: dict[str, Callable[[], object]] = {
            DENSE: lambda: torch.mm(X, dense),
            PROMISED: lambda: moegemm.grouped_gemm(X, W, m_sizes, 1),
            "without": lambda: moegemm.grouped_gemm(x, w, m_sizes, 1),
            "permuted": lambda: moegemm.grouped_gemm(tokens, W, m_sizes, 2, gather, permute_x=True),
        }
        self.best = dict.fromkeys(self.contenders, math.inf)

    def play_round(self, calls: int, number: int) -> None:
        """In an order that alternates: whoever comes second finds the caches as the first left them."""
        contenders = list(self.contenders.items())
        for name, call in contenders[:: -1 if number % 2 else 1]:
            self.best[name] = min(self.best[name], microseconds(call, calls, self.device))


def measure(cases: list[Case], calls: int, rounds: int) -> None:
    """The best of many rounds for each call. The rounds of all cases and contenders take turns, so that each is spread
    over the whole run: a host that is slow for seconds slows all alike."""
    for case in cases:
        case.play_round(calls, 0)
        case.best = dict.fromkeys(case.contenders, math.inf)
    for number in range(rounds):
        for case in cases:
            case.play_round(calls, number)


def usable_case(device: str, dtype: torch.dtype) -> Case | None:
    case = Case(device, dtype)
    try:
        case.contenders[PROMISED]()
    except NotImplementedError as error:
        print(f"{device:8}{case.dtype:10}not compiled: {error}")
        return None
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="calls per round (default: 100)")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds (default: 1000)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a promise is broken")
    options = parser.parse_args()

    if options.threads:
        torch.set_num_threads(options.threads)
    broken = False
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    print(f"{torch.get_num_threads()} CPU threads")
    found = [usable_case(device, dtype) for device in devices for dtype in (torch.float32, torch.bfloat16)]
    cases = [case for case in found if case is not None]
    measure(cases, options.calls, options.rounds)
    names = list(cases[0].contenders)
    print(f"{'device':8}{'dtype':10}" + "".join(f"{name:>16}" for name in names) + f"{'ratio':>8}   promise")
    for case in cases:
        mm, ours = case.best[DENSE], case.best[PROMISED]
        if case.device == "cpu":
            promise, kept = f"<= {CPU_RATIO_LIMIT:g} x torch.mm", ours <= CPU_RATIO_LIMIT * mm
        else:
            promise, kept = f"<= {GPU_HOST_LIMIT_US:g} us of host time", ours <= GPU_HOST_LIMIT_US
        broken |= not kept
        times = "".join(f"{case.best[name]:13.2f} us" for name in names)
        print(f"{case.device:8}{case.dtype:10}{times}{ours / mm:8.2f}   {promise}: {'kept' if kept else 'BROKEN'}")
    return 1 if broken and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
