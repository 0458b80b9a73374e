#!/usr/bin/env python3
"""Times products besides those in aligned bf16: fp32, TF32 and shapes that vectors cannot load, each beside torch's
dense product of the same shape and a loop of them over the experts, and writes the record.

    python benchmarks/paths.py
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from moegemm.bench.cases import OPS, Case, Model, read_catalogue
from moegemm.bench.contenders import Contender, dense, expert_loop, ours
from moegemm.bench.operands import make_operands, make_weights
from moegemm.bench.program import layer_parser, measure_each, number, render_or_measure, started
from moegemm.bench.timing import Clock, spread

STEM = "paths"
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b")
# By path: element type, whether TF32 is allowed, and the largest error against an fp32 reference.
PATHS = {
    "fp32": (torch.float32, False, 1e-5),
    "tf32": (torch.float32, True, 1e-3),
    "unaligned bf16": (torch.bfloat16, False, 1e-2),
}


def model_of(path: str, model: Model) -> Model:
    """An odd hidden size: no row of X, W or dX but the first begins at a multiple of 16 bytes."""
    return replace(model, hidden=model.hidden - 1) if path.startswith("unaligned") else model


def error_of(contender: Contender) -> float:
    result = contender.run()
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is fp32
    try:
        return contender.error(result)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def measure(path: str, case: Case, clock: Clock, rounds: int) -> dict:
    dtype, tf32, limit = PATHS[path]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    weights = None if case.product == "dW" else make_weights(case, "cuda", dtype)
    operands = make_operands(case, weights, "cuda", dtype, seed=case.tokens)
    contenders = {"dense": dense(operands), "expert loop": expert_loop(operands), "moegemm": ours(operands)}
    operands.out.fill_(float("nan"))
    errors = {name: error_of(contender) for name, contender in contenders.items()}
    times = clock.round_robin({name: contender.run for name, contender in contenders.items()}, rounds, case.flops)
    return {
        "path": path,
        "model": case.model.name,
        "hidden": case.model.hidden,
        "op": case.op,
        "tokens": case.tokens,
        "correct": errors["moegemm"] <= limit,
        "contenders": {
            name: spread(times[name])
            | {"tflops": case.flops / statistics.median(times[name]) * 1e-9, "error": errors[name]}
            for name in contenders
        },
    }


def page(record: dict) -> str:
    run = record["run"]
    lines = [
        "# fp32, TF32 and unaligned shapes",
        "",
        f"{run['gpu']}, {run['date']}; torch {run['torch']}, CUDA {run['cuda']}, driver "
        f"{run['driver']}. Written by `benchmarks/paths.py`.",
        "",
        f"TFLOP/s of useful work, {record['cases'][0]['tokens']} tokens, random routing with gather and scatter; round "
        f"robin of the three contenders of a line, medians of {run['rounds']} rounds, caches flushed before each "
        "launch. *dense* is one `torch.mm` with the same FLOPs, *expert loop* one for each expert with the copies that "
        "its user adds; both follow `torch.backends.cuda.matmul.allow_tf32`, as moegemm does. Unaligned: the hidden "
        "size is one less than the model's. *error* is relative to an fp32 product of sampled rows.",
        "",
        "| path | model | op | dense | expert loop | moegemm | of dense | of the loop | error |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in record["cases"]:
        tflops = {name: entry["tflops"] for name, entry in case["contenders"].items()}
        mine = tflops["moegemm"]
        lines.append(
            f"| {case['path']} | {case['model']} | {case['op']} | {tflops['dense']:.0f} | {tflops['expert loop']:.0f} "
            f"| {mine:.0f} | {mine / tflops['dense']:.2f} | {mine / tflops['expert loop']:.2f} "
            f"| {case['contenders']['moegemm']['error']:.1e}{'' if case.get('correct', True) else ' **wrong**'} |"
        )
    return "\n".join(lines) + "\n"


def show(record: dict, folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record))


def measure_all(options: argparse.Namespace) -> dict:
    record, clock = started(options, "cuda", ", ".join(PATHS))
    catalogue = read_catalogue()
    cases = [
        (path, Case(model_of(path, catalogue[name]), options.tokens, "random", op), clock, options.rounds)
        for path in PATHS
        for name in options.models
        for op in OPS
    ]
    measure_each(options, STEM, record, cases, measure, words_of)
    return record


def words_of(entry: dict) -> str:
    tflops = {name: round(found["tflops"]) for name, found in entry["contenders"].items()}
    return f"{entry['path']} {entry['model']} {entry['op']}: {tflops}"


def main() -> None:
    parser = layer_parser(__doc__, MODELS, 7, "paths")
    parser.add_argument("--tokens", type=number, default=8192, help="default: %(default)s")
    render_or_measure(parser.parse_args(), STEM, show, measure_all)


if __name__ == "__main__":
    main()
