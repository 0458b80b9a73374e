#!/usr/bin/env python3
"""Times the expert-major layer on the row layouts that engines hand over, against packed rows of the same counts and
against torch's grouped_mm, and writes the record.

    python benchmarks/row_layouts.py
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moegemm
import torch
import torch.nn.functional as F  # noqa: N812
from moegemm.bench.cases import Model, read_catalogue
from moegemm.bench.program import layer_parser, measure_each, number, render_or_measure, started
from moegemm.bench.timing import Clock
from torch import Tensor

STEM = "row_layouts"
MODELS = ("qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b")
RANKS = 8
CAPACITY = 8
ALIGNMENT = 128
MULTIPROCESSORS = 112  # of 132: what a product gets beside an exchange
HALF = torch.bfloat16
Calls = dict[str, Callable[[], object]]


class Layer:
    """The experts of one rank of eight, and as many rows as reach it."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.experts = model.experts // RANKS
        self.hidden, self.inner = model.hidden, model.intermediate
        generator = torch.Generator().manual_seed(5)
        drawn = torch.rand(tokens, model.experts, generator=generator).topk(model.topk).indices
        self.ids = drawn.cuda()
        self.sizes = torch.bincount(drawn.flatten(), minlength=model.experts)[: self.experts].int().cuda()
        self.count = int(self.sizes.sum())
        self.w_gate_up = self.weights(2 * self.inner, self.hidden)
        self.w_down = self.weights(self.hidden, self.inner)
        self.x = torch.randn(tokens, self.hidden, device="cuda", dtype=HALF)
        self.router = torch.rand(tokens, model.topk, device="cuda")

    def weights(self, rows: int, columns: int) -> Tensor:
        return (torch.randn(self.experts, rows, columns, device="cuda") * columns**-0.5).to(HALF).requires_grad_()

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.hidden, device="cuda", dtype=HALF).requires_grad_()

    def layouts(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """Rows and arguments of each layout, all with the same counts."""
        sizes = self.sizes.long()
        aligned = (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        capacity = int(aligned.max())
        gapped = (aligned.cumsum(0) - aligned).int()
        undefined = {"tails": "undefined", "expected_rows": self.count}
        return {
            "packed": (self.rows(self.count), {}),
            "capacity": (self.rows(CAPACITY * self.count), undefined),
            "gapped": (self.rows(int(aligned.sum())), {"starts": gapped, **undefined}),
            "gapped, one tensor": (
                self.rows(int(aligned.sum())),
                {"sizes": torch.stack((self.sizes, gapped)), **undefined},
            ),
            "masked": (self.rows(self.experts * capacity).view(self.experts, capacity, -1), undefined),
        }


def backward_too(call: Callable[[], Tensor], *leaves: Tensor) -> Callable[[], object]:
    """The call and the gradients of `leaves`. The gradient of its output is made once."""
    gradient = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), leaves, gradient)


def layout_calls(layer: Layer) -> tuple[Calls, Calls]:
    forward: Calls = {}
    both: Calls = {}
    for name, (rows, arguments) in layer.layouts().items():

        def call(rows: Tensor = rows, arguments: dict[str, Any] = arguments) -> Tensor:
            given = {"sizes": layer.sizes, **arguments}
            return moegemm.experts_mlp(rows, layer.w_gate_up, layer.w_down, **given)

        forward[name] = torch.no_grad()(call)
        both[name] = backward_too(call, rows, layer.w_gate_up, layer.w_down)
    rows = layer.rows(layer.count)
    w1, w3 = (w.detach().clone().requires_grad_() for w in layer.w_gate_up.chunk(2, 1))
    offs = layer.sizes.cumsum(0).int()

    def torchtitan() -> Tensor:
        """GroupedExperts of torchtitan: three grouped products and a SiLU."""
        hidden = F.silu(torch._grouped_mm(rows, w1.transpose(-2, -1), offs=offs))
        hidden = hidden * torch._grouped_mm(rows, w3.transpose(-2, -1), offs=offs)
        return torch._grouped_mm(hidden, layer.w_down.transpose(-2, -1), offs=offs)

    def apart() -> Tensor:
        return moegemm.experts_mlp(rows, (w1, w3), layer.w_down, layer.sizes)

    for name, call in (("torch", torchtitan), ("gate and up apart", apart)):
        forward[name] = torch.no_grad()(call)
        both[name] = backward_too(call, rows, w1, w3, layer.w_down)
    return forward, both


def sharded_calls(layer: Layer) -> tuple[Calls, Calls]:
    """What transformers' expert parallelism does: ids of all experts, of which an eighth is here."""
    gathered = layer.rows(layer.count)
    exact = layer.count

    def sharded(max_rows: int | None) -> Callable[[], Tensor]:
        return lambda: moegemm.moe_mlp(x, layer.w_gate_up, layer.w_down, layer.ids, layer.router, max_rows=max_rows)

    x = layer.x.requires_grad_()

    def local() -> Tensor:
        return moegemm.experts_mlp(gathered, layer.w_gate_up, layer.w_down, layer.sizes)

    calls = {"all slots": sharded(None), "local slots": sharded(exact), "packed local rows": local}
    leaves = {"packed local rows": gathered}
    # What the sum of each token's rows reads and writes, moved by a kernel that does nothing else.
    moved = (layer.count + x.size(0)) * layer.hidden
    source, target = (torch.empty(moved // 2, dtype=HALF, device="cuda") for _ in range(2))
    forward: Calls = {name: torch.no_grad()(call) for name, call in calls.items()}
    forward["copy"] = lambda: target.copy_(source)
    both = {
        name: backward_too(call, leaves.get(name, x), layer.w_gate_up, layer.w_down) for name, call in calls.items()
    }
    return forward, both


def kept_bytes(call: Callable[[], Tensor]) -> int:
    """Memory that a forward keeps for its backward, besides its output."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = call()
    return torch.cuda.memory_allocated() - before - out.numel() * out.element_size()


def medians(clock: Clock, calls: Calls, rounds: int, flops: float) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in clock.round_robin(calls, rounds, flops).items()}


def measure(model: Model, tokens: int, rounds: int, clock: Clock) -> dict[str, Any]:
    layer = Layer(model, tokens)
    flops = 6.0 * layer.count * layer.hidden * layer.inner
    entry: dict[str, Any] = {"model": model.name, "tokens": tokens, "rows": layer.count, "experts": layer.experts}
    forward, both = layout_calls(layer)
    entry["layouts"] = {
        "forward": medians(clock, forward, rounds, flops),
        "both": medians(clock, both, rounds, 3 * flops),
    }
    forward, both = sharded_calls(layer)
    entry["sharded"] = {
        "forward": medians(clock, forward, rounds, flops),
        "both": medians(clock, both, rounds, 3 * flops),
    }
    entry["kept_mib"] = {
        name: kept_bytes(
            lambda rows=rows: moegemm.moe_mlp(
                layer.x, layer.w_gate_up, layer.w_down, layer.ids, layer.router, max_rows=rows
            )
        )
        / 2**20
        for name, rows in (("all slots", None), ("local slots", layer.count))
    }
    return entry


def measure_budget(clock: Clock, rounds: int) -> dict[str, Any]:
    """A product on all multiprocessors and on some of them, alone and beside a kernel that holds the others."""
    model = read_catalogue()[MODELS[0]]
    x = torch.randn(8192 * model.topk, model.hidden, device="cuda", dtype=HALF)
    w = torch.randn(model.experts, 2 * model.intermediate, model.hidden, device="cuda", dtype=HALF)
    sizes = torch.full((model.experts,), len(x) // model.experts, dtype=torch.int32, device="cuda")

    def limited() -> Tensor:
        with moegemm.max_multiprocessors(MULTIPROCESSORS):
            return moegemm.grouped_gemm(x, w, sizes, 1)

    calls: Calls = {"all": lambda: moegemm.grouped_gemm(x, w, sizes, 1), "some": limited}
    times = medians(clock, calls, rounds, 2.0 * len(x) * w.shape[1] * w.shape[2])
    everything = torch.cuda.get_device_properties(0).multi_processor_count
    return {"most": MULTIPROCESSORS, "of": everything, **times}


Times = dict[str, dict[str, float]]
PLACED = ("capacity", "gapped", "gapped, one tensor", "masked")


def pair(times: Times, name: str) -> str:
    return f"{times['forward'][name]:.3f} / {times['both'][name]:.3f}"


def ratio(times: Times, name: str, of: str, digits: int = 3) -> str:
    return " / ".join(f"{times[w][name] / times[w][of]:.{digits}f}" for w in ("forward", "both"))


def layout_lines(layers: list[dict[str, Any]]) -> list[str]:
    lines = [
        f'`packed` has exact rows. `capacity` has {CAPACITY} times as many rows as are used and `tails="undefined"`,',
        f"`gapped` segments that begin at multiples of {ALIGNMENT}, with sizes and starts in two tensors, or in one,",
        "which saves a launch, `masked` is rows [E, capacity, H]. `torch` is three `torch._grouped_mm` and a SiLU, as",
        "torchtitan's GroupedExperts has them.",
        "",
        "| layer | rows | packed | capacity | gapped | in one tensor | masked | gate and up apart | torch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in layers:
        names = ("packed", *PLACED, "gate and up apart", "torch")
        cells = [pair(entry["layouts"], name) for name in names]
        lines.append(f"| {entry['model']}, {entry['tokens']} tokens | {entry['rows']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "The same as times of packed rows, and torch as times of both forms of the weights.",
        "",
        "| layer | capacity | gapped | in one tensor | masked | gate and up apart | torch / packed | torch / apart |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in layers:
        times = entry["layouts"]
        cells = [ratio(times, n, "packed") for n in (*PLACED, "gate and up apart")]
        cells += [ratio(times, "torch", of, 2) for of in ("packed", "gate and up apart")]
        lines.append(f"| {entry['model']} | " + " | ".join(cells) + " |")
    return lines


def sharded_lines(layers: list[dict[str, Any]]) -> list[str]:
    lines = [
        "The layer of transformers' expert parallelism: every rank has all tokens, and an eighth of the ids is its.",
        "`all slots` computes a row for each slot, `local slots` (`max_rows=`) for those of this rank. `copy` moves",
        "as many bytes as the sum of each token's rows does. Packed local rows have neither that sum, once forward and",
        "once backward, nor a routing, nor rows to gather.",
        "",
        "| layer | all slots | local slots | packed local rows | local / packed | copy | MiB kept: all slots | local |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in layers:
        times = entry["sharded"]
        cells = [pair(times, n) for n in ("all slots", "local slots", "packed local rows")]
        cells += [ratio(times, "local slots", "packed local rows", 2), f"{times['forward']['copy']:.3f}"]
        cells += [f"{entry['kept_mib'][n]:.0f}" for n in ("all slots", "local slots")]
        lines.append(f"| {entry['model']}, {entry['tokens']} tokens | " + " | ".join(cells) + " |")
    times, name = layers[0]["sharded"]["forward"], layers[0]["model"]
    share = times["copy"] / times["packed local rows"]
    return [
        *lines,
        "",
        f"The goal is 1.15. Of {name}, whose products are short, a copy of the sum's bytes is {share:.2f} of the",
        "forward of packed local rows; `route` takes 7 microseconds, and a first product that reads its rows by index",
        "8 more than one that reads them in order.",
    ]


def page(record: dict[str, Any]) -> str:
    run, budget = record["run"], record["budget"]
    share = budget["all"] / budget["some"]
    return "\n".join([
        "# Rows as engines hand them over",
        "",
        f"Layers of one rank of {RANKS}, bf16, on one {run.get('gpu', run.get('cpu'))}, {run.get('date', '')}; medians "
        f"of {run.get('rounds')} rounds in turns, L2 flushed. Milliseconds, forward / forward and backward.",
        "",
        *layout_lines(record["layers"]),
        "",
        *sharded_lines(record["layers"]),
        "",
        f"On {budget['most']} of {budget['of']} multiprocessors the first product of {MODELS[0]} runs at {share:.3f} "
        f"of its speed on all ({budget['most']}/{budget['of']} = {budget['most'] / budget['of']:.3f}).",
        "",
    ])  # fmt: skip


def show(record: dict[str, Any], folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record))


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    record, clock = started(options, "cuda", "bf16")
    record["budget"] = measure_budget(clock, options.rounds)
    catalogue = read_catalogue()
    cases = [(catalogue[name], options.tokens, options.rounds, clock) for name in options.models]
    measure_each(options, STEM, record, cases, measure, lambda entry: str(entry["model"]), "layers")
    return record


def main() -> None:
    parser = layer_parser(__doc__, MODELS, 20, "rows")
    parser.add_argument("--tokens", type=number, default=8192, help="default: %(default)s")
    render_or_measure(parser.parse_args(), STEM, show, measure_all)


if __name__ == "__main__":
    main()
