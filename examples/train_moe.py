"""Trains a small Mixture-of-Experts transformer on text that it makes up, once with moegemm and once with a loop over
the experts, and compares the two: same loss curve, different speed.

    python examples/train_moe.py                 # a few hundred steps
    python examples/train_moe.py --quick         # less than a minute on two cores
    python examples/train_moe.py --device cuda
"""

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from tqdm import tqdm

try:
    import moegemm
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm

BALANCE_WEIGHT = 0.01  # of the load-balancing loss, as in Switch Transformers
QUICK_STEPS = 120
TOLERANCE = 0.02  # largest mean difference of two loss curves that counts as the same


@dataclass
class Size:
    """Extents of the model and of a batch."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    experts: int = 16
    topk: int = 2
    hidden: int = 256  # of one expert
    context: int = 64
    batch: int = 16


def made_up_text(characters: int, seed: int = 0) -> str:
    """Sentences of a small grammar and sums: enough structure to learn, nothing to download."""
    choose = random.Random(seed)
    nouns = ["router", "expert", "token", "kernel", "tile", "weight", "gradient", "matrix"]
    verbs = ["sends", "gathers", "multiplies", "scatters", "sums", "rounds"]
    adjectives = ["small", "sparse", "busy", "idle", "dense", "warm"]
    parts: list[str] = []
    length = 0
    while length < characters:
        if choose.random() < 0.3:
            a, b = choose.randrange(100), choose.randrange(100)
            part = f"{a} + {b} = {a + b}. "
        else:
            one, two = choose.choice(nouns), choose.choice(nouns)
            part = (
                f"the {choose.choice(adjectives)} {one} {choose.choice(verbs)} the {choose.choice(adjectives)} {two}. "
            )
        parts.append(part)
        length += len(part)
    return "".join(parts)


class Batches:
    """Random windows of a text as character numbers; the same seed gives the same batches."""

    def __init__(self, text: str, size: Size, device: str, seed: int) -> None:
        alphabet = sorted(set(text))
        self.vocabulary = len(alphabet)
        number = {character: i for i, character in enumerate(alphabet)}
        self.data = torch.tensor([number[c] for c in text])
        self.size, self.device = size, device
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        span = torch.arange(self.size.context + 1)
        while True:
            starts = torch.randint(len(self.data) - len(span), (self.size.batch, 1), generator=self.generator)
            window = self.data[starts + span].to(self.device)
            yield window[:, :-1], window[:, 1:]


class Experts(nn.Module):
    """The experts' two matrices: down(silu(gate(x)) * up(x)), gate and up stacked in one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.gate_up = nn.Parameter(torch.randn(size.experts, 2 * size.hidden, size.width) * size.width**-0.5)
        self.down = nn.Parameter(torch.randn(size.experts, size.width, size.hidden) * size.hidden**-0.5)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:  # [T, width], [T, topk] twice
        raise NotImplementedError


class GroupedExperts(Experts):
    """One product per matrix for all experts, with the permutation and the router weights inside."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        topk = self.size.topk
        m_sizes, gather_indices = moegemm.route(ids, self.size.experts)
        h = moegemm.grouped_gemm(x, self.gate_up, m_sizes, topk, gather_indices, permute_x=True)
        gate, up = h.chunk(2, dim=-1)
        y = moegemm.grouped_gemm(
            F.silu(gate) * up, self.down, m_sizes, topk, gather_indices,
            permute_y=True, topk_weights=weights, fuse_mul_post=True, is_first_gemm=False,
        )  # fmt: skip
        return moegemm.combine(y, topk=topk)


class LoopedExperts(Experts):
    """The same mathematics, one expert after the other."""

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.size.experts):
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert]) * weights[tokens, slots].unsqueeze(1)
            out = out.index_add(0, tokens, y.to(out.dtype))
        return out


class MoeLayer(nn.Module):
    """A router over the experts; `balance` holds the load-balancing loss of the last call."""

    def __init__(self, size: Size, experts: type[Experts]) -> None:
        super().__init__()
        self.size = size
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = experts(size)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.size.width)
        probabilities = self.router(flat).float().softmax(-1)
        weights, ids = probabilities.topk(self.size.topk)
        weights = weights / weights.sum(-1, keepdim=True)
        # The fraction of rows an expert gets times the probability it was given: least when both are even.
        fraction = F.one_hot(ids, self.size.experts).float().mean((0, 1))
        self.balance = self.size.experts * (fraction * probabilities.mean(0)).sum()
        return self.experts(flat, weights, ids).view(x.shape)


class Block(nn.Module):
    """Attention, then experts, each with a norm before and a shortcut around it."""

    def __init__(self, size: Size, experts: type[Experts]) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.norm_experts = nn.LayerNorm(size.width)
        self.moe = MoeLayer(size, experts)

    def forward(self, x: Tensor) -> Tensor:  # [batch, context, width]
        batch, context, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, -1).transpose(1, 3)
        attended = F.scaled_dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.moe(self.norm_experts(x))


class Transformer(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, vocabulary: int, size: Size, experts: type[Experts]) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, experts) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.characters(ids) + self.positions.weight[: ids.shape[1]]
        balance = torch.zeros((), device=ids.device)
        for block in self.blocks:
            x = block(x)
            balance = balance + block.moe.balance
        return self.head(self.norm(x)), balance


class Training:
    """One model in training: its losses, and the time of each step."""

    def __init__(self, experts: type[Experts], text: str, size: Size, steps: int, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        batches = Batches(text, size, device, seed)
        self.model = Transformer(batches.vocabulary, size, experts).to(device)
        self.batches = iter(batches)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps))),
        )
        self.precision = torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()
        self.tokens = size.batch * size.context
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        ids, targets = next(self.batches)
        start = time.perf_counter()
        with self.precision:
            logits, balance = self.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE_WEIGHT * balance).backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device, so that the clock is right
        self.seconds.append(time.perf_counter() - start)

    @property
    def tokens_per_second(self) -> float:
        """Of the median step; the first one warms up."""
        return self.tokens / statistics.median(self.seconds[1:] or self.seconds)


def train_in_turns(trainings: dict[str, Training], steps: int) -> None:
    """One step of each, in an order that turns: a busy moment of the machine meets them all, and decides no median."""
    order = list(trainings.values())
    progress = tqdm(range(steps), desc="training", unit="step", mininterval=0.5, disable=None)
    for _ in progress:
        for training in order:
            training.step()
        order.reverse()
        progress.set_postfix_str(f"loss {order[0].losses[-1]:.3f}", refresh=False)


def draw(curves: dict[str, list[float]], title: str, path: Path) -> str:
    """The loss curves as a PNG; says where it is, or why there is none."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    styles = [{"linewidth": 3.0, "alpha": 0.45}, {"linewidth": 1.0, "color": "black", "linestyle": "--"}]
    for (name, losses), style in zip(curves.items(), styles, strict=False):
        axes.plot(range(1, len(losses) + 1), losses, label=name, **style)
    axes.set(xlabel="step", ylabel="loss per character (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"loss curves: {path}"


def comparison_options(
    description: str | None, steps: int, quick_steps: int, plot: str, device: str | None = None
) -> argparse.Namespace:
    """Of a program that trains two models and compares them. `device`: the default, None where it depends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each model (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"at most {quick_steps} steps")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default=device, help="default: cuda where each process has a GPU"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path(plot), help="where the PNG goes (default: %(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE,
        help="largest mean difference of the loss curves that counts as the same (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; it must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device")
    options.steps = min(options.steps, quick_steps) if options.quick else options.steps
    return options


def compare(steps: int, device: str, seed: int, tolerance: float, plot: Path) -> bool:
    """Trains both and says how they compare; whether the curves are the same."""
    text, size = made_up_text(200_000, seed), Size()
    trainings = {
        name: Training(experts, text, size, steps, device, seed)
        for name, experts in (("moegemm", GroupedExperts), ("loop over experts", LoopedExperts))
    }
    train_in_turns(trainings, steps)
    grouped, looped = trainings.values()
    pairs = list(zip(grouped.losses, looped.losses, strict=True))
    difference = sum(abs(a - b) for a, b in pairs) / len(pairs)
    same = difference <= tolerance
    first, last = grouped.losses[0], grouped.losses[-1]
    speeds = grouped.tokens_per_second, looped.tokens_per_second
    print(
        f"loss {first:.3f} -> {last:.3f} with moegemm, {looped.losses[-1]:.3f} with the loop; "
        f"curves differ by {difference:.5f} on average ({'same' if same else 'NOT the same'} within {tolerance:g}); "
        f"{speeds[0]:,.0f} against {speeds[1]:,.0f} tokens/s in the median step: {speeds[0] / speeds[1]:.2f}x"
    )
    curves = {name: training.losses for name, training in trainings.items()}
    print(draw(curves, "A small MoE transformer on made-up text", plot))
    return same


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = comparison_options(__doc__, 300, QUICK_STEPS, "train_moe.png", device)
    return 0 if compare(options.steps, options.device, options.seed, options.tolerance, options.plot) else 1


if __name__ == "__main__":
    sys.exit(main())
