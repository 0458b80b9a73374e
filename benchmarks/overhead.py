"""Time of one tiny call (E = 4, 8 rows, N = K = 64, autograd on) next to torch.mm of that size.

On the CPU the whole call counts and at most 3 times torch.mm is promised; on a GPU the host's time counts, at most
15 microseconds. `--check` exits with 1 when a promise is broken.
"""

import argparse
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


def measure(device: str, dtype: torch.dtype, calls: int, rounds: int) -> dict[str, float]:
    """The best of many rounds per call; rounds alternate, so that a slow moment hits all alike."""
    X = torch.randn(8, 64, device=device, dtype=dtype, requires_grad=True)
    W = torch.randn(4, 64, 64, device=device, dtype=dtype, requires_grad=True)
    plain = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    m_sizes = torch.full((4,), 2, device=device, dtype=torch.int32)
    candidates = {
        "torch.mm": lambda: torch.mm(X, plain),
        "grouped_gemm": lambda: moegemm.grouped_gemm(X, W, m_sizes, 1),
    }
    for call in candidates.values():
        microseconds(call, calls, device)
    timed: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, call in candidates.items():
            timed[name].append(microseconds(call, calls, device))
    return {name: min(times) for name, times in timed.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="calls per round (default: 500)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds (default: 60)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a promise is broken")
    options = parser.parse_args()

    if options.threads:
        torch.set_num_threads(options.threads)
    broken = False
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    print(f"{torch.get_num_threads()} CPU threads")
    print(f"{'device':8}{'dtype':10}{'torch.mm':>12}{'grouped_gemm':>14}{'ratio':>8}   promise")
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                times = measure(device, dtype, options.calls, options.rounds)
            except NotImplementedError as error:
                print(f"{device:8}{str(dtype)[6:]:10}not compiled: {error}")
                continue
            mm, ours = times["torch.mm"], times["grouped_gemm"]
            if device == "cpu":
                promise, kept = f"<= {CPU_RATIO_LIMIT:g} x torch.mm", ours <= CPU_RATIO_LIMIT * mm
            else:
                promise, kept = f"<= {GPU_HOST_LIMIT_US:g} us of host time", ours <= GPU_HOST_LIMIT_US
            broken |= not kept
            print(
                f"{device:8}{str(dtype)[6:]:10}{mm:9.2f} us{ours:11.2f} us{ours / mm:8.2f}   "
                f"{promise}: {'kept' if kept else 'BROKEN'}"
            )
    return 1 if broken and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
