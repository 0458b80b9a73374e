"""Times what surrounds the exchange of an expert-parallel layer on one GPU: route, pack, index and combine, with the
shapes of one rank of EP 8. Beside it the same steps as torchtitan takes them, in torch's own operators, and what moving
the bytes of pack and combine takes. Writes the record.

    python benchmarks/expert_parallel.py                                   # Qwen3-30B, 8192 tokens
    python benchmarks/expert_parallel.py --tokens 64 --experts 16 --ranks 2 --hidden 32 --device cpu --rounds 2

The exchange itself is left out: every rank is taken to send what the others send, so that what arrives has the sizes of
what was sent.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import moegemm
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm
from moegemm.bench.program import add_device_option, add_record_options, number, render_or_measure, started
from moegemm.bench.record import write_json
from moegemm.distributed.exchange import Splits, arrived, packed
from moegemm.distributed.sending import ids_at_target, once_per_rank, once_per_slot, order_of

STEM = "expert_parallel"
STEPS = ("route", "pack", "index", "combine", "all")
WAYS = {"per slot": "a row for each slot", "once per rank": "`unique=True`", "torch": "torch's operators"}
Calls = dict[str, Callable[[], object]]


class Layer:
    """One rank's tokens and routing, and rows as experts would give them back."""

    def __init__(self, options: argparse.Namespace) -> None:
        random = torch.Generator().manual_seed(0)
        self.ranks, self.experts, self.topk = options.ranks, options.experts, options.topk
        device, dtype = options.device, torch.bfloat16
        self.x = torch.randn(options.tokens, options.hidden, generator=random).to(device, dtype)
        weights, ids = torch.rand(options.tokens, options.experts, generator=random).topk(options.topk)
        self.weights, self.ids = weights.to(device), ids.to(device)
        self.rows = torch.randn(options.tokens * options.topk, options.hidden, generator=random).to(device, dtype)
        # What the one wait of a call would have told the host.
        counts = torch.bincount(ids.flatten(), minlength=options.experts).view(self.ranks, -1)
        self.sent = counts.sum(1).tolist()
        self.counts = counts.to(device)


def moegemm_steps(layer: Layer) -> Calls:
    sending = once_per_slot(layer.ids, layer.experts, layer.ranks)
    rows = sum(layer.sent)
    order = order_of(sending, rows, True, False)
    splits = Splits("", layer.sent, layer.sent, True)

    def everything() -> Tensor:
        found = once_per_slot(layer.ids, layer.experts, layer.ranks)
        packed(layer.x, order_of(found, rows, True, False))
        arrived(layer.counts, splits, False)
        return moegemm.combine(layer.rows, layer.weights, positions=found.positions)

    return {
        "route": lambda: once_per_slot(layer.ids, layer.experts, layer.ranks),
        "pack": lambda: packed(layer.x, order),
        "index": lambda: arrived(layer.counts, splits, False),
        "combine": lambda: moegemm.combine(layer.rows, layer.weights, positions=sending.positions),
        "all": everything,
    }


def unique_steps(layer: Layer) -> Calls:
    """A token travels once to each rank, with its ids; the weights are multiplied there."""
    sending = once_per_rank(layer.ids, layer.experts, layer.ranks)
    rows, here = int(sending.counts.sum()), layer.experts // layer.ranks
    order = order_of(sending, rows, False, False)

    def everything() -> Tensor:
        found = once_per_rank(layer.ids, layer.experts, layer.ranks)
        its_order = order_of(found, rows, False, False)
        packed(layer.x, its_order)
        ids_at_target(layer.ids, its_order, here)
        return moegemm.combine(layer.rows[:rows], positions=found.positions)

    return {
        "route": lambda: once_per_rank(layer.ids, layer.experts, layer.ranks),
        "pack": lambda: packed(layer.x, order),
        "index": lambda: ids_at_target(layer.ids, order, here),
        "combine": lambda: moegemm.combine(layer.rows[:rows], positions=sending.positions),
        "all": everything,
    }


def torch_steps(layer: Layer) -> Calls:
    """Sort, gather, permute rank-major to expert-major and back, scale and scatter-add: what a dispatcher in torch does
    around its two exchanges."""
    flat = layer.ids.flatten()
    order = flat.argsort(stable=True)
    here = layer.experts // layer.ranks
    of_blocks = torch.arange(here, device=flat.device).repeat(layer.ranks)

    def permutation() -> Tensor:
        ids = of_blocks.repeat_interleave(layer.counts.view(-1), output_size=flat.numel())
        return ids.argsort(stable=True)

    to_experts = permutation()

    def unsort(rows: Tensor) -> Tensor:
        home = torch.empty_like(rows)
        home[to_experts] = rows
        return home

    def scatter(rows: Tensor) -> Tensor:
        weighted = (rows.float() * layer.weights.flatten()[order].unsqueeze(1)).to(rows.dtype)
        index = (order // layer.topk).unsqueeze(1).expand(-1, rows.size(1))
        return torch.zeros_like(layer.x).scatter_add(0, index, weighted)

    def everything() -> Tensor:
        sorted_slots = flat.argsort(stable=True)
        torch.bincount(flat, minlength=layer.experts) if flat.device.type == "cpu" else flat.float().histc(
            layer.experts
        )
        layer.x.index_select(0, sorted_slots // layer.topk)
        layer.rows.index_select(0, permutation())
        return scatter(unsort(layer.rows))

    return {
        "route": lambda: flat.argsort(stable=True),
        "pack": lambda: layer.x.index_select(0, order // layer.topk),
        "index": lambda: layer.rows.index_select(0, permutation()),
        "combine": lambda: scatter(unsort(layer.rows)),
        "all": everything,
    }


def bytes_alone(layer: Layer, sent_rows: int) -> Calls:
    """Kernels that only move what pack reads and writes, which is what combine writes and reads."""
    moved = (layer.x.size(0) + sent_rows) * layer.x.size(1)
    source, target = (torch.empty(moved // 2, dtype=layer.x.dtype, device=layer.x.device) for _ in range(2))
    rows = layer.rows[:sent_rows]
    return {"copy": lambda: target.copy_(source), "fill": lambda: torch.empty_like(rows).zero_()}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("tokens", 8192),
        ("experts", 128),
        ("topk", 8),
        ("hidden", 2048),
        ("ranks", 8),
        ("rounds", 30),
    ):
        parser.add_argument(f"--{name}", type=number, default=value, help="default: %(default)s")
    add_device_option(parser)
    add_record_options(parser, "rows")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    record, clock = started(options, options.device, "bf16")
    layer = Layer(options)
    unique_rows = int(once_per_rank(layer.ids, layer.experts, layer.ranks).counts.sum())
    rows = {"per slot": sum(layer.sent), "once per rank": unique_rows, "torch": sum(layer.sent)}
    ways = {"per slot": moegemm_steps(layer), "once per rank": unique_steps(layer), "torch": torch_steps(layer)}
    calls = {f"{way}: {step}": call for way, steps in ways.items() for step, call in steps.items()}
    for way in ("per slot", "once per rank"):
        calls |= {f"{way}: {name}": call for name, call in bytes_alone(layer, rows[way]).items()}
    times = clock.round_robin(calls, options.rounds)
    us = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    shape = {name: getattr(options, name) for name in ("tokens", "experts", "topk", "hidden", "ranks")}
    record |= {"shape": shape, "rows": rows, "us": us}
    write_json(record, options.out, STEM)
    print(page(record))
    return record


def page(record: dict[str, Any]) -> str:
    run, shape, us = record["run"], record["shape"], record["us"]
    lines = [
        "# Around the exchange of an expert-parallel layer",
        "",
        f"{shape['tokens']} tokens, top {shape['topk']} of {shape['experts']} experts, hidden {shape['hidden']}, one "
        f"rank of {shape['ranks']}, bf16, on one {run.get('gpu', run.get('cpu'))}, {run.get('date', '')}; medians of "
        f"{run.get('rounds')} rounds in turns, caches flushed. Microseconds.",
        "",
        "The exchange itself is left out. `pack` copies tokens in the order in which they are sent, `index` tells",
        "experts where the rows that came are, `combine` sums a token's rows. In torch's operators, as torchtitan's",
        "dispatcher has them, `index` and `combine` also move rows between the order of ranks and that of experts.",
        "",
        "| way | rows sent | " + " | ".join(STEPS) + " |",
        "|---|" + "---|" * (len(STEPS) + 1),
    ]
    for way, what in WAYS.items():
        cells = [f"{us[f'{way}: {step}']:.0f}" for step in STEPS]
        lines.append(f"| {what} | {record['rows'][way]} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "What memory allows: a copy of as many bytes as pack reads and writes, which combine moves the other way, and",
        "a fill of the rows that pack writes.",
        "",
        "| rows sent | MB moved by pack, and by combine | copy | fill | route, index and two copies |",
        "|---|---|---|---|---|",
    ]
    for way in ("per slot", "once per rank"):
        moved = (shape["tokens"] + record["rows"][way]) * shape["hidden"] * 2 / 1e6
        copy, fill = us[f"{way}: copy"], us[f"{way}: fill"]
        least = us[f"{way}: route"] + us[f"{way}: index"] + 2 * copy
        lines.append(f"| {record['rows'][way]} | {moved:.0f} | {copy:.0f} | {fill:.0f} | {least:.0f} |")
    return "\n".join([
        *lines,
        "",
        "The goal for these shapes on an H200 is 150 microseconds. A row for each slot, which gives the bits of one",
        "process, is above it by the time of its bytes alone; a row for each rank of a token is below it.",
        "",
    ])  # fmt: skip


def show(record: dict[str, Any], folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record))


if __name__ == "__main__":
    render_or_measure(parse_options(), STEM, show, measure)
