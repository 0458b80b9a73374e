#!/usr/bin/env python3
"""Measures moegemm's CPU operators against torch's own, side by side in one process.

Every case is one product of the first GEMM of an MoE layer, whose activations are in token order: torch's user
has to gather the rows (forward, dW) or put them back (dX), with `index_select` and `index_copy_`. Torch is
represented by the better of `torch._grouped_mm` and a loop of `torch.mm` over the experts. The contenders take
turns, each round beginning with another one: what the one before leaves in caches and free memory is shared out
evenly. Every output is allocated anew as a user would, medians are compared, and every result is checked against
float64 on sampled elements.
"""

import argparse
import datetime
import itertools
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
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import moegemm  # noqa: E402
from moegemm.bench.record import add_render_option, read_to_render, write_json  # noqa: E402

OPS = ("forward", "dX", "dW")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TOKENS = (16, 256, 2048)
LEAST_ROUNDS = 15
STEM = "cpu"
# Targets: every case, all cases, and the cases of one op (geometric means).
LEAST_CASE, LEAST_MEAN, LEAST_OP_MEAN = 1.05, 1.9, 1.7


@dataclass(frozen=True)
class Layer:
    """The first GEMM of a layer, scaled down so that its gradients fit any machine."""

    name: str
    experts: int
    topk: int
    n: int
    k: int


LAYERS = (
    Layer("mixtral", experts=8, topk=2, n=1792, k=1024),
    Layer("qwen3", experts=128, topk=8, n=768, k=512),
    Layer("llama4", experts=16, topk=1, n=2048, k=1280),
)


@dataclass
class Result:
    """One line of the record. Times are medians in milliseconds; half of a contender's are between its quartiles."""

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
    ours_quartiles_ms: tuple[float, float] | None = None  # the small form of a record leaves them out
    torch_quartiles_ms: tuple[float, float] | None = None


class Routed:
    """Operands of one layer for one number of tokens, as the router leaves them."""

    def __init__(self, layer: Layer, dtype: torch.dtype, weights: Tensor, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layer, self.w = layer, weights
        scores = torch.rand(tokens, layer.experts, generator=generator)
        expert_ids = scores.topk(layer.topk, dim=1).indices
        self.m_sizes, self.gather = moegemm.route(expert_ids, layer.experts)[:2]
        self.rows = tokens * layer.topk
        self.x = torch.randn(tokens, layer.k, generator=generator).to(dtype)
        self.dy = torch.randn(self.rows, layer.n, generator=generator).to(dtype)
        # What torch's user computes once per layer is not charged to torch.
        self.gather_long = self.gather.long()
        self.token_of_row = self.gather_long // layer.topk
        self.ends = self.m_sizes.cumsum(0).to(torch.int32)
        bounds = [0, *self.ends.tolist()]
        self.segments = list(itertools.pairwise(bounds))


def ours(op: str, d: Routed) -> Tensor:
    topk = d.layer.topk
    if op == "forward":
        return moegemm.grouped_gemm_forward(d.x, d.w, topk, d.m_sizes, d.gather, permute_x=True)
    if op == "dX":
        return moegemm.grouped_gemm_dX(d.dy, d.w, d.gather, d.m_sizes, topk, permute_x=True)
    return moegemm.grouped_gemm_dW(d.x, d.dy, d.m_sizes, d.gather, topk, permute_x=True)


def torch_loop(op: str, d: Routed) -> Tensor:
    layer = d.layer
    if op == "forward":
        x = d.x.index_select(0, d.token_of_row)
        out = d.x.new_empty(d.rows, layer.n)
        for e, (begin, end) in enumerate(d.segments):
            if begin < end:
                torch.mm(x[begin:end], d.w[e].t(), out=out[begin:end])
        return out
    if op == "dX":
        dx = d.x.new_empty(d.rows, layer.k)
        for e, (begin, end) in enumerate(d.segments):
            if begin < end:
                torch.mm(d.dy[begin:end], d.w[e], out=dx[begin:end])
        return torch.empty_like(dx).index_copy_(0, d.gather_long, dx)
    x = d.x.index_select(0, d.token_of_row)
    dw = torch.empty_like(d.w)
    for e, (begin, end) in enumerate(d.segments):
        if begin < end:
            torch.mm(d.dy[begin:end].t(), x[begin:end], out=dw[e])
        else:
            dw[e].zero_()
    return dw


def torch_grouped(op: str, d: Routed) -> Tensor:
    if op == "forward":
        return torch._grouped_mm(d.x.index_select(0, d.token_of_row), d.w.transpose(1, 2), offs=d.ends)
    if op == "dX":
        dx = torch._grouped_mm(d.dy, d.w, offs=d.ends)
        return torch.empty_like(dx).index_copy_(0, d.gather_long, dx)
    return torch._grouped_mm(d.dy.t(), d.x.index_select(0, d.token_of_row), offs=d.ends)


def sampled_error(op: str, d: Routed, out: Tensor, generator: torch.Generator) -> float:
    """Norm of the error over the norm of the result, in float64, on sampled rows of the output."""
    if not bool(torch.isfinite(out.sum(dtype=torch.float64))):
        return math.inf
    expert_of_row = torch.repeat_interleave(torch.arange(d.layer.experts), d.m_sizes.long())
    difference = reference_norm = 0.0
    if op == "dW":
        for e in torch.randint(d.layer.experts, (4,), generator=generator).tolist():
            begin, end = d.segments[e]
            columns = torch.randint(d.layer.n, (16,), generator=generator)
            x = d.x[d.token_of_row[begin:end]].double()
            expected = d.dy[begin:end, columns].double().t() @ x
            difference += (out[e, columns].double() - expected).square().sum().item()
            reference_norm += expected.square().sum().item()
    else:
        for r in torch.randint(d.rows, (6,), generator=generator).tolist():
            w = d.w[expert_of_row[r]].double()
            if op == "forward":
                expected, actual = w @ d.x[d.token_of_row[r]].double(), out[r].double()
            else:
                expected, actual = d.dy[r].double() @ w, out[d.gather_long[r]].double()
            difference += (actual - expected).square().sum().item()
            reference_norm += expected.square().sum().item()
    return math.sqrt(difference / max(reference_norm, 1e-300))


def timed(run: Callable[[str, Routed], Tensor], op: str, d: Routed) -> float:
    start = time.perf_counter()
    run(op, d)
    return time.perf_counter() - start


def quartiles_ms(seconds: list[float]) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(seconds, n=4)
    return lower * 1e3, upper * 1e3


def measure(layer: Layer, dtype: str, tokens: int, op: str, d: Routed, seconds: float) -> Result:
    contenders = {"moegemm": ours, "torch._grouped_mm": torch_grouped, "loop of torch.mm": torch_loop}
    generator = torch.Generator().manual_seed(7)
    errors = {}
    for name, run in list(contenders.items()):
        try:
            errors[name] = sampled_error(op, d, run(op, d), generator)
        except (RuntimeError, NotImplementedError):
            if run is ours or run is torch_loop:
                raise
            del contenders[name]  # this torch has no such kernel for the CPU
    tolerance = 2e-5 if dtype == "fp32" else 6e-3
    for name, error in errors.items():
        if not error < tolerance:
            raise SystemExit(f"{name} {op} {layer.name} T={tokens} {dtype}: error {error:.2e}, accepted is {tolerance}")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    deadline = time.perf_counter() + seconds
    names = list(contenders)
    rounds = 0
    while rounds < LEAST_ROUNDS or time.perf_counter() < deadline:
        first = rounds % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timed(contenders[name], op, d))
        rounds += 1
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in medians if name != "moegemm"), key=medians.__getitem__)
    flops = 2.0 * d.rows * layer.n * layer.k
    return Result(
        layer=layer.name,
        dtype=dtype,
        tokens=tokens,
        op=op,
        ours_ms=medians["moegemm"] * 1e3,
        torch_ms=medians[best] * 1e3,
        torch_by=best,
        ratio=medians[best] / medians["moegemm"],
        ours_gflops=flops / medians["moegemm"] / 1e9,
        error=errors["moegemm"],
        rounds=rounds,
        ours_quartiles_ms=quartiles_ms(times["moegemm"]),
        torch_quartiles_ms=quartiles_ms(times[best]),
    )


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(results: list[Result]) -> dict[str, float]:
    means = {"all": geometric_mean([r.ratio for r in results]), "least": min(r.ratio for r in results)}
    for op in OPS:
        ratios = [r.ratio for r in results if r.op == op]
        if ratios:
            means[op] = geometric_mean(ratios)
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


def table(results: list[Result], layers: list[Layer]) -> str:
    lines = []
    for layer in layers:
        lines += [
            f"### {layer.name}: E = {layer.experts}, topk = {layer.topk}, N = {layer.n}, K = {layer.k}",
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


def document(results: list[Result], layers: list[Layer], facts: dict[str, object]) -> str:
    means = summary(results)
    by_op = ", ".join(f"{op} {means[op]:.2f}" for op in OPS if op in means)
    return f"""# CPU: moegemm against torch

Written by `python benchmarks/cpu_vs_torch.py`; the same numbers are in `cpu.json`. Ratio is torch's time over ours.

**Geometric mean {means["all"]:.2f}x** over {len(results)} cases ({by_op}); smallest ratio {means["least"]:.2f}x.

- {facts["processor"]}, {facts["threads"]} threads, {facts["instruction_set"]}, {facts["date"]}
- scheduling: {facts["scheduling"]}
- moegemm {facts["moegemm"]}, torch {facts["torch"]}, Python {facts["python"]}, {facts["system"]}
- torch is the better of `torch._grouped_mm` and a loop of `torch.mm`, with the `index_select` / `index_copy_` that
  its user needs; our permutation is inside the kernels. Outputs are allocated at every call on both sides, contenders
  take turns, each round beginning with another one, medians of at least {LEAST_ROUNDS} rounds count, and every result
  was checked against float64 on sampled elements.

{table(results, layers)}"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names, metavar="LAYER", help=", ".join(names))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="input dtypes")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="numbers of tokens T")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="products")
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
    cases = len(layers) * len(options.dtypes) * len(options.tokens) * len(options.ops)
    with tqdm(total=cases, unit="case", disable=None) as progress:
        for layer in layers:
            for dtype in options.dtypes:
                generator = torch.Generator().manual_seed(options.seed)
                weights = torch.empty(layer.experts, layer.n, layer.k, dtype=DTYPES[dtype])
                weights.uniform_(-1, 1, generator=generator)
                for tokens in options.tokens:
                    data = Routed(layer, DTYPES[dtype], weights, tokens, options.seed)
                    for op in options.ops:
                        progress.set_description(f"{layer.name} {dtype} T={tokens} {op}")
                        result = measure(layer, dtype, tokens, op, data, options.seconds)
                        results.append(result)
                        progress.update()
                        if not sys.stderr.isatty():
                            print(
                                f"{layer.name} {dtype} T={tokens} {op}: {result.ratio:.2f}x",
                                file=sys.stderr,
                                flush=True,
                            )
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
