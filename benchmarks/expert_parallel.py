"""Times what surrounds the exchange of an expert-parallel layer on one GPU: route, pack, index and combine, with the
shapes of one rank of EP 8. Beside it the same steps as torchtitan takes them, in torch's own operators.

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

import torch
from torch import Tensor

try:
    import moegemm
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm
from moegemm.bench.timing import Clock
from moegemm.distributed.exchange import Splits, arrived, packed
from moegemm.distributed.sending import ids_at_target, once_per_rank, once_per_slot, order_of

GOAL_US = 150.0


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


def moegemm_steps(layer: Layer) -> dict[str, Callable[[], object]]:
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


def unique_steps(layer: Layer) -> dict[str, Callable[[], object]]:
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


def torch_steps(layer: Layer) -> dict[str, Callable[[], object]]:
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
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    layer = Layer(options)
    calls = {f"moegemm: {name}": call for name, call in moegemm_steps(layer).items()}
    calls |= {f"once per rank: {name}": call for name, call in unique_steps(layer).items()}
    calls |= {f"torch: {name}": call for name, call in torch_steps(layer).items()}
    times = Clock(options.device).round_robin(calls, options.rounds)
    print(
        f"{options.tokens} tokens, top {options.topk} of {options.experts} experts, hidden {options.hidden}, "
        f"EP {options.ranks}, bf16 on {options.device}: microseconds, median of {options.rounds}"
    )
    for name, found in times.items():
        print(f"  {name:28} {1e3 * statistics.median(found):9.1f}")
    all_of_it = 1e3 * statistics.median(times["moegemm: all"])
    print(f"around the exchange: {all_of_it:.1f} us; the goal for Qwen3-30B on an H200 is {GOAL_US:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
