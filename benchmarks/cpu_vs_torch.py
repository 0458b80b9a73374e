#!/usr/bin/env python3
"""Measures moegemm's CPU operators against torch's own, side by side in one process.

Every case is one product of the first GEMM of an MoE layer, whose activations are in token order: torch's user
has to gather the rows (forward, dW) or put them back (dX). Torch is
represented by the better of `torch._grouped_mm` and a loop of `torch.mm` over the experts. The contenders take
turns in changing order: what the one before leaves in caches and free memory is shared out evenly. Every output is
allocated anew as a user would, medians are compared, and every result is checked against float64 on sampled elements.
"""

import argparse
import datetime
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import moegemm  # noqa: E402
from moegemm.bench import contenders  # noqa: E402
from moegemm.bench.cases import Case, Model  # noqa: E402
from moegemm.bench.measure import DTYPES  # noqa: E402
from moegemm.bench.operands import Operands, has_nan, make_operands, make_weights  # noqa: E402
from moegemm.bench.record import add_render_option, read_to_render, write_json  # noqa: E402
from moegemm.bench.timing import Clock  # noqa: E402

OPS = {"forward": "fwd1", "dX": "dx1", "dW": "dw1"}
# By dtype.
LARGEST_ERROR = {"bf16": 6e-3, "fp32": 2e-5}
TOKENS = (16, 256, 2048)
LEAST_ROUNDS = 15
STEM = "cpu"
# Targets: every case, all cases, and the cases of one op (geometric means).
LEAST_CASE, LEAST_MEAN, LEAST_OP_MEAN = 1.05, 1.9, 1.7

# Scaled down so that gradients fit any machine.
LAYERS = (
    Model("mixtral", experts=8, topk=2, hidden=1024, intermediate=896),
    Model("qwen3", experts=128, topk=8, hidden=512, intermediate=384),
    Model("llama4", experts=16, topk=1, hidden=1280, intermediate=1024),
)


@dataclass
class Result:
    """One line of the record. Times are medians in milliseconds."""

    layer: str
    dtype: str
    tokens: int
    op: str
    ours_ms: float
    torch_ms: float
    torch_by: str
    ratio: float
    ours_gflops: float
    error: float
    rounds: int


OURS, GROUPED, LOOP = "moegemm", "torch._grouped_mm", "loop of torch.mm"


def contenders_of(operands: Operands) -> dict[str, contenders.Contender]:
    """All allocate their result at each call, as a user would. Some torch has no grouped product for the CPU."""
    everybody = {
        OURS: contenders.ours(operands, fresh=True),
        GROUPED: contenders.torch_with_copies(operands),
        LOOP: contenders.expert_loop(operands, fresh=True),
    }
    try:
        everybody[GROUPED].run()
    except (RuntimeError, NotImplementedError):
        del everybody[GROUPED]
    return everybody


def checked_error(contender: contenders.Contender) -> float:
    result = contender.run()
    return math.inf if has_nan(result) else contender.error(result)


def times_of(clock: Clock, calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + seconds
    while not times[OURS] or time.perf_counter() < deadline:
        for name, found in clock.round_robin(calls, LEAST_ROUNDS).items():
            times[name] += found
    return times


def measure(case: Case, dtype: str, operands: Operands, clock: Clock, seconds: float) -> Result:
    op = case.product
    everybody = contenders_of(operands)
    errors = {name: checked_error(contender) for name, contender in everybody.items()}
    for name, error in errors.items():
        if not error < LARGEST_ERROR[dtype]:
            raise SystemExit(f"{name} {case} {dtype}: error {error:.2e}, accepted is {LARGEST_ERROR[dtype]}")
    times = times_of(clock, {name: contender.run for name, contender in everybody.items()}, seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in medians if name != OURS), key=medians.__getitem__)
    return Result(
        layer=case.model.name,
        dtype=dtype,
        tokens=case.tokens,
        op=op,
        ours_ms=medians[OURS],
        torch_ms=medians[best],
        torch_by=best,
        ratio=medians[best] / medians[OURS],
        ours_gflops=case.flops / medians[OURS] * 1e-6,
        error=errors[OURS],
        rounds=len(times[OURS]),
    )


def summary(results: list[Result]) -> dict[str, float]:
    means = {"all": statistics.geometric_mean([r.ratio for r in results]), "least": min(r.ratio for r in results)}
    for op in OPS:
        ratios = [r.ratio for r in results if r.op == op]
        if ratios:
            means[op] = statistics.geometric_mean(ratios)
    return means


def shortfalls(means: dict[str, float]) -> list[str]:
    wanted = {"least": LEAST_CASE, "all": LEAST_MEAN} | dict.fromkeys(OPS, LEAST_OP_MEAN)
    return [f"{name} {means[name]:.2f} < {least}" for name, least in wanted.items() if means.get(name, 99) < least]


def scheduling() -> str:
    """How the system schedules this process: on a machine with other users that decides what a time means."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    return "normal" if os.sched_getscheduler(0) == os.SCHED_OTHER else "real-time, ahead of other processes"


def machine() -> dict[str, object]:
    cpu = moegemm.info()["cpu"]
    return {
        "processor": cpu["model"],
        "threads": torch.get_num_threads(),
        "instruction_set": cpu["isa"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "moegemm": moegemm.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "scheduling": scheduling(),
    }


def table(results: list[Result], layers: list[Model]) -> str:
    lines = []
    for layer in layers:
        _, n, k = layer.weight_shape("fwd1")
        lines += [
            f"### {layer.name}: E = {layer.experts}, topk = {layer.topk}, N = {n}, K = {k}",
            "",
            "| T | dtype | op | moegemm ms | GFLOP/s | torch ms | torch by | ratio |",
            "|---:|---|---|---:|---:|---:|---|---:|",
        ]
        for r in results:
            if r.layer == layer.name:
                lines.append(
                    f"| {r.tokens} | {r.dtype} | {r.op} | {r.ours_ms:.2f} | {r.ours_gflops:.0f} "
                    f"| {r.torch_ms:.2f} | `{r.torch_by}` | **{r.ratio:.2f}** |"
                )
        lines.append("")
    return "\n".join(lines)


def document(results: list[Result], layers: list[Model], facts: dict[str, object]) -> str:
    means = summary(results)
    by_op = ", ".join(f"{op} {means[op]:.2f}" for op in OPS if op in means)
    return f"""# CPU: moegemm against torch

Written by `python benchmarks/cpu_vs_torch.py`; the same numbers are in `cpu.json`. Ratio is torch's time over ours.

**Geometric mean {means["all"]:.2f}x** over {len(results)} cases ({by_op}); smallest ratio {means["least"]:.2f}x.

- {facts["processor"]}, {facts["threads"]} threads, {facts["instruction_set"]}, {facts["date"]}
- scheduling: {facts["scheduling"]}
- moegemm {facts["moegemm"]}, torch {facts["torch"]}, Python {facts["python"]}, {facts["system"]}
- torch is the better of `torch._grouped_mm` and a loop of `torch.mm`, with the copies that its user needs; our
  permutation is inside the kernels. Outputs are allocated at every call on both sides, contenders take turns in
  changing order, medians of at least {LEAST_ROUNDS} rounds count, and every result was checked against float64 on
  sampled elements.

{table(results, layers)}"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names, metavar="LAYER", help=", ".join(names))
    dtypes = list(LARGEST_ERROR)
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="input dtypes")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="numbers of tokens T")
    parser.add_argument("--ops", nargs="+", choices=list(OPS), default=list(OPS), help="products")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="least measuring time of each case (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of operands and routing")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "cpu", help="folder of the record")
    add_render_option(parser)
    parser.add_argument("--dry", action="store_true", help="print the table, write nothing")
    return parser.parse_args()


def render(source: Path, folder: Path) -> None:
    record = read_to_render(source, folder, STEM)
    results = [Result(**case) for case in record["cases"]]
    layers = [layer for layer in LAYERS if any(r.layer == layer.name for r in results)]
    (folder / f"{STEM}.md").write_text(document(results, layers, record["machine"]))


def main() -> int:
    options = arguments()
    if options.render:
        render(options.render, options.out)
        return 0
    layers = [layer for layer in LAYERS if layer.name in options.layers]
    results: list[Result] = []
    clock = Clock("cpu", flush=False)
    cases = len(layers) * len(options.dtypes) * len(options.tokens) * len(options.ops)
    with tqdm(total=cases, unit="case", disable=None) as progress:
        for layer in layers:
            for dtype in options.dtypes:
                torch.manual_seed(options.seed)
                weights = make_weights(Case(layer, 1, "random", "fwd1"), "cpu", DTYPES[dtype])
                for tokens in options.tokens:
                    for op in options.ops:
                        case = Case(layer, tokens, "random", OPS[op])
                        progress.set_description(f"{case} {dtype}")
                        operands = make_operands(case, weights, "cpu", DTYPES[dtype], options.seed)
                        results.append(measure(case, dtype, operands, clock, options.seconds))
                        progress.update()
                        if not sys.stderr.isatty():
                            print(f"{case} {dtype}: {results[-1].ratio:.2f}x", file=sys.stderr, flush=True)
    facts = machine()
    text = document(results, layers, facts)
    print(text)
    if not options.dry:
        record = {"machine": facts, "summary": summary(results), "cases": [asdict(r) for r in results]}
        write_json(record, options.out, STEM)
        (options.out / f"{STEM}.md").write_text(text)
    short = shortfalls(summary(results))
    if short:
        print("below target: " + "; ".join(short), file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
