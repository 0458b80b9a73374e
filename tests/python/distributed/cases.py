"""Layers that are spread over ranks: tokens, routing and weights of all of them, the same in every process."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One layer. `tokens` has the number of tokens of each rank in turn."""

    name: str
    tokens: tuple[int, ...] = (7, 5, 9, 3)
    topk: int = 2
    experts: int = 8
    hidden: int = 24
    inner: int = 20
    routing: str = "random"
    activation: str = "swiglu"
    layout: str = "concatenated"
    transposed: bool = False
    biases: bool = False
    weighted: bool = True
    frozen: bool = False
    x_needs_grad: bool = True
    weights_dtype: str = "float32"


CASES = [
    Case("random"),
    Case("all to one expert", routing="one"),
    Case("a rank without tokens", tokens=(6, 0, 4, 1)),
    Case("no tokens at all", tokens=(0, 0, 0, 0)),
    Case("a rank that receives nothing", routing="not the last"),
    Case("topk 1", topk=1),
    Case("topk 8", topk=8, experts=16),
    Case("duplicate ids", routing="duplicates", topk=4),
    Case("ids outside", routing="outside", topk=3),
    Case("odd sizes", hidden=23, inner=13, tokens=(13, 1, 2, 31), topk=3, experts=12),
    Case("biases", biases=True),
    Case("gpt-oss", biases=True, activation="clamped_swiglu", layout="interleaved", transposed=True, topk=4),
    Case("without weights", weighted=False),
    Case("without a gate", activation="relu2"),
    Case("frozen experts", frozen=True),
    Case("input without gradient", x_needs_grad=False),
    Case("weights as x", weights_dtype="as x"),
    Case("many rows", tokens=(150, 90, 40, 120), topk=4, hidden=40, inner=33),
]
BY_NAME = {case.name: case for case in CASES}


@dataclass
class Layer:
    """Tensors of all ranks. `parts` are a rank's own: tokens, and experts."""

    case: Case
    x: Tensor
    ids: Tensor
    router_weights: Tensor | None
    w_gate_up: Tensor
    w_down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    d_out: Tensor
    ranks: int

    @property
    def options(self) -> dict:
        case = self.case
        return {"activation": case.activation, "layout": case.layout, "transposed": case.transposed}

    def tokens_of(self, rank: int) -> slice:
        counts = self.counts
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    @property
    def counts(self) -> list[int]:
        return [self.case.tokens[rank % len(self.case.tokens)] for rank in range(self.ranks)]

    def experts_of(self, rank: int) -> slice:
        here = self.case.experts // self.ranks
        return slice(rank * here, (rank + 1) * here)


def ids_for(case: Case, tokens: int, random: torch.Generator) -> Tensor:
    shape = (tokens, case.topk)
    if case.routing == "one":
        return torch.full(shape, case.experts - 1)
    if case.routing == "duplicates":
        return torch.randint(0, 3, shape, generator=random)
    if case.routing == "outside":
        return torch.randint(-3, case.experts + 3, shape, generator=random)
    chosen = torch.rand(tokens, case.experts, generator=random)
    if case.routing == "not the last":  # the last quarter of the experts: of 2 or 4 ranks the last one
        chosen[:, case.experts // 2 :] = -1.0
    return chosen.topk(case.topk).indices


def build(case: Case, ranks: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    tokens = sum(case.tokens[rank % len(case.tokens)] for rank in range(ranks))
    columns = case.inner if case.activation in ("relu2", "silu") else 2 * case.inner
    first, second = (case.experts, columns, case.hidden), (case.experts, case.hidden, case.inner)
    if case.transposed:
        first, second = (first[0], first[2], first[1]), (second[0], second[2], second[1])
    weights = torch.rand(tokens, case.topk, generator=random).to(device)
    return Layer(
        case, normal(tokens, case.hidden), ids_for(case, tokens, random).to(device),
        (weights.to(dtype) if case.weights_dtype == "as x" else weights) if case.weighted else None,
        normal(*first) * 0.2, normal(*second) * 0.2,
        normal(case.experts, columns) if case.biases else None,
        normal(case.experts, case.hidden) if case.biases else None,
        normal(tokens, case.hidden), ranks,
    )  # fmt: skip


def leaf(tensor: Tensor | None, needs_grad: bool = True) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone().requires_grad_(needs_grad)


def with_ranks(case: Case, ranks: int) -> Case:
    """The case with experts for every rank, for "a rank that receives nothing" too."""
    return replace(case, experts=max(case.experts, ranks * 2))
