"""How good the planner's heuristic is: every compiled kernel of a problem against the one that the heuristic takes,
over all models of the catalogue and over layers drawn at random, measured by the tuner itself, and beside torch with
the copies that its user makes."""

import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moegemm.bench import contenders
from moegemm.bench.cases import OPS, ROUTINGS, Case, Model
from moegemm.bench.operands import Operands, SharedWeights, bytes_needed, make_operands
from moegemm.bench.pages.report import Entry, describe, table
from moegemm.bench.timing import Clock
from moegemm.operators.loading import ops
from moegemm.operators.options import AUTOTUNE, MULTIPLY, PERMUTE_X, PERMUTE_Y

TOKENS = (16, 64, 512, 2048, 8192, 32768)
LAYERS = 200
SEED = 2027
# In every problem, in nineteen of twenty, and in the geometric mean.
WANTED_LEAST, WANTED_MOSTLY, WANTED_MEAN = 0.90, 0.95, 0.985
MOST_BELOW_MOSTLY = 1 / 20
SHOWN = 15  # problems of a table: a page that shows all of them is read by nobody
# Large problems get the time for about six launches of each of five kernels, whatever the budget is.
LAUNCHES, SLOW_FLOPS_PER_S = 30, 5e14
TORCH_ROUNDS = 11


@dataclass(frozen=True)
class Ranges:
    """What layers are drawn from. The memory is that of both products' weights in bf16, and of any product at its
    peak."""

    experts: tuple[int, int] = (4, 512)
    widths: tuple[int, int] = (256, 16384)
    tokens: tuple[int, int] = (1, 32768)
    most_topk: int = 12
    weight_bytes: int = 16 << 30
    product_bytes: int = 60 << 30


ON_GPU = Ranges()
ON_CPU = Ranges(experts=(4, 8), widths=(64, 256), tokens=(1, 4))
WIDTH_STEP = 8  # elements: rows of bf16 begin at multiples of 16 bytes


def layer_cases(count: int, seed: int, ranges: Ranges) -> list[Case]:
    """The products of layers drawn at random, each with one token count and one routing: experts, widths and tokens as
    often between 4 and 8 as between 64 and 128, widths in multiples of 8."""
    draw = random.Random(seed)

    def between(least: int, most: int) -> int:
        return round(math.exp(draw.uniform(math.log(least), math.log(most))))

    def width() -> int:
        least, most = ranges.widths
        return WIDTH_STEP * between(least // WIDTH_STEP, most // WIDTH_STEP)

    cases: list[Case] = []
    while len(cases) < count * len(OPS):
        experts = between(*ranges.experts)
        topk = draw.randint(1, min(ranges.most_topk, experts))
        model = Model(f"layer {len(cases) // len(OPS) + 1}", experts, topk, width(), width())
        tokens, routing = between(*ranges.tokens), draw.choice(ROUTINGS)
        products = [Case(model, tokens, routing, op) for op in OPS]
        weights = 6 * experts * model.hidden * model.intermediate
        if weights <= ranges.weight_bytes and max(map(bytes_needed, products)) <= ranges.product_bytes:
            cases += products
    return cases


def cases_of(models: Sequence[Model], tokens: Iterable[int]) -> list[Case]:
    """Cases that share weights follow each other."""
    counts = sorted(set(tokens), reverse=True)
    return [Case(model, count, "random", op) for model in models for op in OPS for count in counts]


@dataclass(frozen=True)
class Settings:
    device: str
    dtype: torch.dtype
    budget: float  # seconds of the tuner per problem
    deadline: float  # of time.monotonic()
    clock: Clock | None = None  # times torch + copies too


def measure(cases: Sequence[Case], settings: Settings, keep: Callable[[Entry], None]) -> int:
    """Hands each measured case to `keep`; returns how many the time did not reach."""
    weights = SharedWeights(settings.device, settings.dtype)
    for done, case in enumerate(cases):
        if time.monotonic() > settings.deadline:
            return len(cases) - done
        if settings.device == "cuda" and weights.missing_bytes(case) > 0:
            keep(_skipped(case, f"needs {bytes_needed(case) >> 30} GiB"))
            continue
        keep(_measure_case(case, weights.of(case), settings))
    return 0


def _named(case: Case) -> Entry:
    return {"model": case.model.name, "tokens": case.tokens, "routing": case.routing, "op": case.op}


def _skipped(case: Case, why: str) -> Entry:
    empty: Entry = {"heuristic": "", "best": "", "us": {}, "reached": 1.0, "only_kernel": False, "seconds": 0.0}
    return _named(case) | empty | {"skipped": why}


def _measure_case(case: Case, weights: Tensor | None, settings: Settings) -> Entry:
    o = make_operands(case, weights, settings.device, settings.dtype, seed=case.tokens)
    budget = max(settings.budget, LAUNCHES * case.flops / SLOW_FLOPS_PER_S)
    entry = _tune(o, budget)
    if entry["reached"] < WANTED_MOSTLY:
        # A kernel that seems slow is given up after two launches, and one of them may have been disturbed.
        entry = _tune(o, budget)
    return entry if settings.clock is None else entry | _beside_torch(o, settings.clock)


def _tune(o: Operands, budget: float) -> Entry:
    case = o.case
    options = AUTOTUNE + (PERMUTE_X if case.first else PERMUTE_Y)
    if o.router_weights is not None:
        options += MULTIPLY
    first = o.X if case.product == "forward" else o.dY
    second = o.X if case.product == "dW" else o.W
    found = ops.tune.default(
        case.product.lower(), first, second, o.routing.m_sizes, o.routing.gather_indices, o.router_weights,
        case.model.topk, options, budget, True,
    )  # fmt: skip
    report = json.loads(found)
    timed = {c["kernel"]: c["us"] for c in report["candidates"] if c["launches"] > 0}
    # The tuner times the heuristic's kernel first.
    heuristic = next(iter(timed), report["kernel"])
    best = min(timed, key=lambda kernel: timed[kernel]) if timed else heuristic
    entry = _named(case) | {
        "heuristic": heuristic,
        "best": best,
        "us": timed,
        # Never timed; a refitted heuristic must not take one of them for slow without looking.
        "pruned": [c["kernel"] for c in report["candidates"] if c["outcome"].startswith("pruned")],
        "reached": timed[best] / timed[heuristic] if timed else 1.0,
        "only_kernel": not timed and bool(report["why_not"]),
        "seconds": report["seconds"],
        "operand_sets": report["operand_sets"],
        "flushed": report["flushed"],
        "memory_bytes": report["memory_bytes"],
    }
    return entry if timed or report["why_not"] else entry | {"skipped": "no kernel was timed within the budget"}


def _beside_torch(o: Operands, clock: Clock) -> Entry:
    """Ours with the heuristic's kernel and torch + copies in one round robin, microseconds; nothing where torch cannot
    run the product."""
    calls = {"ours_us": contenders.ours(o).run, "torch_us": contenders.torch_with_copies(o).run}
    try:
        calls["torch_us"]()
        clock.synchronize()
    except RuntimeError:
        return {}
    times = clock.round_robin(calls, TORCH_ROUNDS, o.case.flops)
    return {name: 1e3 * statistics.median(measured) for name, measured in times.items()}


def quality_lines(entries: Sequence[Entry]) -> list[str]:
    skipped = sum(bool(e.get("skipped")) for e in entries)
    entries = [e for e in entries if not e.get("skipped")]
    chosen = [e for e in entries if not e["only_kernel"]]
    if not chosen:
        return ["No problem had more than one kernel."]
    mean = statistics.geometric_mean(e["reached"] for e in chosen)
    over_all = statistics.geometric_mean(e["reached"] for e in entries)
    least = min(chosen, key=lambda e: float(e["reached"]))
    below = sum(e["reached"] < WANTED_MOSTLY for e in chosen)
    right = sum(e["best"] == e["heuristic"] for e in chosen)
    slowest = max(e["seconds"] for e in chosen)
    return [
        f"- Least speed reached: **{least['reached']:.3f}** of the best kernel's, at {_words(least)} (wanted: "
        f"{WANTED_LEAST:.2f}).",
        f"- Below {WANTED_MOSTLY:.2f}: **{below}** of the {len(chosen)} problems with a choice (wanted: at most "
        f"{int(MOST_BELOW_MOSTLY * len(chosen))}).",
        f"- Geometric mean: **{mean:.3f}** over the problems with a choice, {over_all:.3f} over all {len(entries)} "
        f"(wanted: {WANTED_MEAN:.3f}).",
        *torch_lines(entries),
        f"- The heuristic's kernel was the fastest in {right} of {len(chosen)} problems.",
        f"- Tuning took {sum(e['seconds'] for e in chosen) / len(chosen):.2f} s per problem on average, {slowest:.2f} "
        "s at most.",
        *memory_lines(chosen),
        *([f"- {skipped} problems were not timed."] if skipped else []),
    ]


def _words(entry: Entry) -> str:
    return describe({"routing": "random"} | entry)  # older records have no other


def torch_lines(entries: Sequence[Entry]) -> list[str]:
    """How often torch + copies is faster; older records do not say."""
    ratios = [(e["torch_us"] / e["ours_us"], e) for e in entries if "torch_us" in e]
    if not ratios:
        return []
    slower = sum(ratio < 1 for ratio, _ in ratios)
    least, where = min(ratios, key=lambda pair: pair[0])
    return [
        f"- Slower than torch + copies: **{slower}** of {len(ratios)} problems (wanted: none); the least is "
        f"{least:.3f} times torch's speed, at {_words(where)}."
    ]


def memory_lines(entries: Sequence[Entry]) -> list[str]:
    """What the tuner borrowed; older records do not say."""
    told = [e for e in entries if e.get("memory_bytes")]
    if not told:
        return []
    rotated = [e for e in told if e["operand_sets"] > 1]
    flushed = sum(e["flushed"] for e in told)
    line = f"- Scratch memory of the tuner, outputs of the products included: up to {_mebibytes(told)}."
    if rotated:
        line += (
            f" {len(rotated)} problems smaller than twice L2 rotated through copies, with up to {_mebibytes(rotated)}."
        )
    return [line + (f" In {flushed} problems L2 was overwritten instead." if flushed else "")]


def _mebibytes(entries: Sequence[Entry]) -> str:
    return f"{max(e['memory_bytes'] for e in entries) / 2**20:.0f} MiB"


def to_markdown(record: dict[str, Any]) -> str:
    run, entries = record["run"], record["cases"]
    layers = record.get("held_out", {"models": [], "cases": []})
    listed = {model["name"]: model for model in (*record.get("models", {}).values(), *layers["models"])}
    lines = [
        "# The planner's choice against every compiled kernel",
        "",
        f"{run['gpu']}, {run['dtype']}, {run['date']}. Written by `moegemm-bench --planner`: "
        "the tuner measures the kernels of each problem in turn, with cold caches, and keeps the medians. What is "
        "reached is the speed of the heuristic's kernel as a share of the fastest one's. Budget of the tuner: at least "
        f"{run['budget_seconds']:g} s per problem. Each section shows its {SHOWN} worst problems.",
        "",
    ]
    if run.get("measured_twice"):
        lines += [f"What reached less than {WANTED_MOSTLY:.2f} was measured a second time, which counts.", ""]
    if entries:
        lines += _section("The models of the catalogue", entries, listed)
    if layers["cases"]:
        drawn = f"{len(layers['models'])} layers, drawn with seed {layers['seed']}."
        lines += _section("Layers drawn at random", layers["cases"], listed, drawn)
    both = [*entries, *layers["cases"]]
    lines += ["## How often each kernel is the fastest, and is taken", "", *_kernels(both), ""]
    return "\n".join(lines)


def _section(title: str, entries: Sequence[Entry], models: dict[str, Entry], *notes: str) -> list[str]:
    lines = [f"## {title}", ""]
    for note in notes:
        lines += [note, ""]
    return [*lines, *quality_lines(entries), "", *_worst(entries, models), "", *_slower_than_torch(entries, models)]


def _problem(entry: Entry, models: dict[str, Entry]) -> list[str]:
    """Experts x topk and hidden x intermediate beside the name: that of a random layer says nothing."""
    model = models.get(entry["model"])
    sizes = "{experts}/{topk}, {hidden} x {intermediate}".format(**model) if model else ""
    return [entry["model"], sizes, entry["op"], entry.get("routing", "random"), str(entry["tokens"])]


PROBLEM = ("model", "experts/topk, hidden x intermediate", "op", "routing", "tokens")


def _worst(entries: Sequence[Entry], models: dict[str, Entry]) -> list[str]:
    slower = sorted((e for e in entries if e["us"] and e["reached"] < 1), key=lambda e: float(e["reached"]))
    rows = [
        [
            *_problem(e, models), e["heuristic"], e["best"], f"{e['us'][e['heuristic']]:.1f}",
            f"{e['us'][e['best']]:.1f}", f"{e['reached']:.3f}",
        ]
        for e in slower[:SHOWN]
    ]  # fmt: skip
    return table((*PROBLEM, "taken", "fastest", "us", "fastest, us", "reached"), rows, 4)


def _slower_than_torch(entries: Sequence[Entry], models: dict[str, Entry]) -> list[str]:
    slower = [(e["torch_us"] / e["ours_us"], e) for e in entries if e.get("torch_us", 1) < e.get("ours_us", 0)]
    if not slower:
        return []
    rows = [
        [*_problem(e, models), e["heuristic"], f"{e['ours_us']:.1f}", f"{e['torch_us']:.1f}", f"{ratio:.3f}"]
        for ratio, e in sorted(slower, key=lambda pair: pair[0])[:SHOWN]
    ]
    return [*table((*PROBLEM, "taken", "us", "torch + copies, us", "times torch's speed"), rows, 4), ""]


def _kernels(entries: Sequence[Entry]) -> list[str]:
    fastest = Counter(e["best"] for e in entries if e["us"])
    taken = Counter(e["heuristic"] for e in entries if e["us"])
    rows = [[name, str(fastest[name]), str(taken[name])] for name in sorted(fastest | taken)]
    return table(("kernel", "fastest", "taken"), rows, 1)
