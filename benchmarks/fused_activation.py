#!/usr/bin/env python3
"""Times the first product of an expert layer with its activation in one call, as inference runs it, against product and
activation after one another, as training runs them, and writes the record.

    python benchmarks/fused_activation.py
    python benchmarks/fused_activation.py --models demo --tokens 64 --device cpu --out /tmp
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import moegemm  # registers the operators
import torch
from moegemm.activations import activation_named
from moegemm.bench.cases import Model, read_catalogue
from moegemm.bench.program import add_device_option, layer_parser, measure_each, number, render_or_measure, started
from moegemm.bench.timing import Clock, spread
from moegemm.operators.options import PERMUTE_X

OPS = torch.ops.moegemm
STEM = "fused_activation"
MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "qwen3-next-80b-a3b", "olmoe", "deepseek-v3", "gpt-oss-120b")
JOINED, APART, PRODUCT = "one call", "product, then activation", "product alone"


def calls_of(model: Model, tokens: int, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    """All on one layer's tensors. gpt-oss: clamped SwiGLU, interleaved, with a bias."""
    experts, hidden, inner, topk = model.experts, model.hidden, model.intermediate, model.topk
    oss = model.name.startswith("gpt-oss")

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=scale)

    w = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    bias = normal(experts, 2 * inner, scale=0.1) if oss else None
    named = ("clamped_swiglu", "interleaved") if oss else ("swiglu", "concatenated")
    activation = activation_named(*named, None, None, None).text()
    x = normal(tokens, hidden)
    ids = torch.rand(tokens, experts, device=device).topk(topk, dim=-1).indices
    m_sizes, gather = moegemm.route(ids, experts)

    def joined() -> torch.Tensor:
        return OPS.forward(x, w, m_sizes, gather, None, topk, PERMUTE_X, bias=bias, activation=activation)

    def product() -> torch.Tensor:
        return OPS.forward(x, w, m_sizes, gather, None, topk, PERMUTE_X)

    return {JOINED: joined, APART: lambda: OPS.activate(product(), bias, m_sizes, activation), PRODUCT: product}


def measure(model: Model, tokens: int, device: str, rounds: int, clock: Clock) -> dict:
    calls = calls_of(model, tokens, device)
    flops = 4.0 * tokens * model.topk * model.intermediate * model.hidden
    same = torch.equal(calls[JOINED](), calls[APART]())
    times = clock.round_robin(calls, rounds, flops)
    return {
        "model": model.name,
        "tokens": tokens,
        "ms": {name: spread(times[name]) for name in calls},
        "same_bits": same,
    }


def page(record: dict) -> str:
    run = record["run"]
    lines = [
        "# The first product with its activation",
        "",
        f"{run['gpu']}, torch {run['torch']}, {run['date']}, bf16, gathered rows, random routing, caches "
        f"flushed; medians of {run['rounds']} rounds, one round robin for each line. *One call* asks "
        "for product and activation together: the planner fuses them where it expects that to be faster, and else runs "
        "what *apart* runs, the product and then one pass for bias and activation. gpt-oss: clamped SwiGLU, "
        "interleaved, with a bias, W as [E, 2 I, H].",
        "",
        "| model | tokens | one call, ms | apart, ms | product alone, ms | times faster | same bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in record["cases"]:
        joined, apart, alone = (entry["ms"][name]["ms"] for name in (JOINED, APART, PRODUCT))
        lines.append(
            f"| {entry['model']} | {entry['tokens']} | {joined:.3f} | {apart:.3f} | {alone:.3f} | {apart / joined:.2f} "
            f"| {'yes' if entry['same_bits'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def show(record: dict, folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record))


def measure_all(options: argparse.Namespace) -> dict:
    record, clock = started(options, options.device, "bf16")
    catalogue = read_catalogue()
    cases = [
        (catalogue[name], tokens, options.device, options.rounds, clock)
        for name in options.models
        for tokens in options.tokens
    ]
    measure_each(options, STEM, record, cases, measure, words_of)
    return record


def words_of(entry: dict) -> str:
    factor = entry["ms"][APART]["ms"] / entry["ms"][JOINED]["ms"]
    return f"{entry['model']}, {entry['tokens']} tokens: {factor:.2f} times faster"


def main() -> None:
    parser = layer_parser(__doc__, MODELS, 20, "layer")
    add_device_option(parser)
    parser.add_argument("--tokens", nargs="+", type=number, default=[64, 512, 2048, 8192], help="default: %(default)s")
    render_or_measure(parser.parse_args(), STEM, show, measure_all)


if __name__ == "__main__":
    main()
