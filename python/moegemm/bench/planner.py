"""How good the planner's heuristic is: every compiled kernel of a problem against the one that the heuristic takes,
over all models of the catalogue and over shapes that no border of the heuristic was fitted to, measured by the tuner
itself."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moegemm.bench.cases import OPS, Case, Model
from moegemm.bench.operands import SharedWeights, bytes_needed, make_operands
from moegemm.bench.pages.report import MISSING, by_model, geometric_mean, table, table_over_tokens
from moegemm.operators.loading import ops
from moegemm.operators.options import AUTOTUNE, MULTIPLY, PERMUTE_X, PERMUTE_Y

TOKENS = (16, 64, 512, 2048, 8192, 32768)
HELD_OUT_TOKENS = (24, 200, 1000, 5000, 20000)
HELD_OUT_MODELS = 10
HELD_OUT_SEED = 2026
WANTED_MEAN, WANTED_LEAST = 0.95, 0.85

Entry = dict[str, Any]


def held_out_models(count: int, seed: int, largest: int = 8192, most_experts: int = 256) -> list[Model]:
    """Layers drawn at random: experts as often between 4 and 8 as between 64 and 128; widths are multiples of
    64 and 32 up to `largest`, the weights at most 16 GiB in bf16."""
    draw = random.Random(seed)
    models: list[Model] = []
    while len(models) < count:
        experts = round(4 * (most_experts / 4) ** draw.random())
        topk = draw.randint(1, min(8, experts // 2))
        hidden = 64 * draw.randint(1 + largest // 640, largest // 64)
        intermediate = 32 * draw.randint(1 + largest // 640, largest // 32)
        if 6 * experts * hidden * intermediate > 16 << 30 or intermediate > 4 * hidden:
            continue
        models.append(Model(f"held-out {len(models) + 1}", experts, topk, hidden, intermediate))
    return models


def cases_of(models: Sequence[Model], tokens: Iterable[int]) -> list[Case]:
    """Cases that share weights follow each other."""
    counts = sorted(set(tokens), reverse=True)
    return [Case(model, count, "random", op) for model in models for op in OPS for count in counts]


def measure(
    cases: Sequence[Case],
    device: str,
    dtype: torch.dtype,
    budget: float,
    deadline: float,
    keep: Callable[[Entry], None],
) -> int:
    """Hands each measured case to `keep`; returns how many the time did not reach."""
    weights = SharedWeights(device, dtype)
    for done, case in enumerate(cases):
        if time.monotonic() > deadline:
            return len(cases) - done
        if device == "cuda" and weights.missing_bytes(case) > 0:
            keep(_skipped(case, f"needs {bytes_needed(case) >> 30} GiB"))
            continue
        keep(_measure_case(case, weights.of(case), device, dtype, budget))
    return 0


def _skipped(case: Case, why: str) -> Entry:
    empty: Entry = {"heuristic": "", "best": "", "us": {}, "reached": 1.0, "only_kernel": False, "seconds": 0.0}
    return {"model": case.model.name, "tokens": case.tokens, "op": case.op} | empty | {"skipped": why}


def _measure_case(case: Case, weights: Tensor | None, device: str, dtype: torch.dtype, budget: float) -> Entry:
    o = make_operands(case, weights, device, dtype, seed=case.tokens)
    options = AUTOTUNE + (PERMUTE_X if case.first else PERMUTE_Y)
    if o.topk_weights is not None:
        options += MULTIPLY
    first = o.X if case.product == "forward" else o.dY
    second = o.X if case.product == "dW" else o.W
    found = ops.tune.default(
        case.product.lower(), first, second, o.routing.m_sizes, o.routing.gather_indices, o.topk_weights,
        case.model.topk, options, budget, True,
    )  # fmt: skip
    report = json.loads(found)
    timed = {c["kernel"]: c["us"] for c in report["candidates"] if c["launches"] > 0}
    # The tuner times the heuristic's kernel first.
    heuristic = next(iter(timed), report["kernel"])
    best = min(timed, key=lambda kernel: timed[kernel]) if timed else heuristic
    entry = {
        "model": case.model.name,
        "tokens": case.tokens,
        "op": case.op,
        "heuristic": heuristic,
        "best": best,
        "us": timed,
        "reached": timed[best] / timed[heuristic] if timed else 1.0,
        "only_kernel": not timed and bool(report["why_not"]),
        "seconds": report["seconds"],
        "operand_sets": report["operand_sets"],
        "flushed": report["flushed"],
        "memory_bytes": report["memory_bytes"],
    }
    return entry if timed or report["why_not"] else entry | {"skipped": "no kernel was timed within the budget"}


def quality_lines(entries: Sequence[Entry]) -> list[str]:
    skipped = sum(bool(e.get("skipped")) for e in entries)
    entries = [e for e in entries if not e.get("skipped")]
    chosen = [e for e in entries if not e["only_kernel"]]
    if not chosen:
        return ["No problem had more than one kernel."]
    mean = geometric_mean(e["reached"] for e in chosen)
    over_all = geometric_mean(e["reached"] for e in entries)
    least = min(chosen, key=lambda e: float(e["reached"]))
    right = sum(e["best"] == e["heuristic"] for e in chosen)
    slowest = max(e["seconds"] for e in chosen)
    return [
        f"- Geometric mean of the speed reached: **{mean:.3f}** of the best kernel's over the {len(chosen)} problems "
        f"with a choice, {over_all:.3f} over all {len(entries)} (wanted: {WANTED_MEAN:.2f}).",
        f"- Least: **{least['reached']:.3f}** at {least['model']} {least['op']}, {least['tokens']} tokens "
        f"(wanted: {WANTED_LEAST:.2f}); {sum(e['reached'] < WANTED_MEAN for e in chosen)} problems below "
        f"{WANTED_MEAN:.2f}.",
        f"- The heuristic's kernel was the fastest in {right} of {len(chosen)} problems.",
        f"- Tuning took {sum(e['seconds'] for e in chosen) / len(chosen):.2f} s per problem on average, {slowest:.2f} "
        "s at most.",
        *memory_lines(chosen),
        *([f"- {skipped} problems were not timed."] if skipped else []),
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
    held_out = record.get("held_out")
    lines = [
        "# The planner's choice against every compiled kernel",
        "",
        f"{run['gpu']}, {run['dtype']}, {run['date']}. Written by `moegemm-bench --planner`: "
        "the tuner measures the kernels of each problem in turn, with cold caches, and keeps the medians. A cell is "
        "the speed of the heuristic's kernel as a share of the fastest one's; **bold** is below "
        f"{WANTED_MEAN:.2f}, – means that only one kernel runs the problem. Budget of the tuner: "  # noqa: RUF001
        f"{run['budget_seconds']:g} s per problem. Routing is random.",
        "",
        *_section("The models of the catalogue", entries),
    ]
    if held_out:
        lines += [
            *_section("Shapes that the heuristic has not seen", held_out["cases"]),
            f"These layers were drawn at random with seed {held_out['seed']}. The heuristic's borders were fitted to "
            "the models of the catalogue and to layers of other seeds, not to these.",
            "",
            *_shapes(held_out["models"]),
            "",
        ]
    both = entries + (held_out["cases"] if held_out else [])
    lines += ["## How often each kernel is the fastest, and is taken", "", *_kernels(both), ""]
    return "\n".join(lines)


def _section(title: str, entries: Sequence[Entry]) -> list[str]:
    return [
        f"## {title}",
        "",
        *quality_lines(entries),
        "",
        *_every_problem(entries),
        "",
        f"Less than {WANTED_MEAN:.2f}:",
        "",
        *_worst(entries),
        "",
    ]


def _shapes(models: Sequence[dict[str, Any]]) -> list[str]:
    columns = ("name", "experts", "topk", "hidden", "intermediate")
    return table(columns, [[str(model[column]) for column in columns] for model in models], 1)


def _every_problem(entries: Sequence[Entry]) -> list[str]:
    def cell(entry: Entry | None) -> str:
        if entry is None or entry.get("skipped"):
            return ""
        if entry["only_kernel"]:
            return MISSING
        text = f"{entry['reached']:.2f}"
        return f"**{text}**" if entry["reached"] < WANTED_MEAN else text

    return table_over_tokens(by_model(entries), cell)


def _worst(entries: Sequence[Entry]) -> list[str]:
    slower = sorted((e for e in entries if e["us"] and e["reached"] < WANTED_MEAN), key=lambda e: float(e["reached"]))
    if not slower:
        return ["None."]
    rows = [
        [
            e["model"], e["op"], str(e["tokens"]), e["heuristic"], e["best"], f"{e['us'][e['heuristic']]:.1f}",
            f"{e['us'][e['best']]:.1f}", f"{e['reached']:.3f}",
        ]
        for e in slower
    ]  # fmt: skip
    return table(("model", "op", "tokens", "taken", "fastest", "us", "fastest, us", "reached"), rows, 2)


def _kernels(entries: Sequence[Entry]) -> list[str]:
    fastest = Counter(e["best"] for e in entries if e["us"])
    taken = Counter(e["heuristic"] for e in entries if e["us"])
    rows = [[name, str(fastest[name]), str(taken[name])] for name in sorted(fastest | taken)]
    return table(("kernel", "fastest", "taken"), rows, 1)
