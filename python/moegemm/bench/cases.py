"""What is measured: models, products, token counts and routings, in order of importance."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

# Installed with the package, or where a checkout keeps it for the program too.
_PLACES = (
    Path(__file__).resolve().parent / "models.json",
    Path(__file__).resolve().parents[3] / "data" / "models.json",
)

DEFAULT_MODELS = (
    "qwen3-30b-a3b",
    "mixtral-8x7b",
    "llama4-scout",
    "gpt-oss-120b",
    "qwen3-next-80b-a3b",
    "deepseek-v3",
)
DEFAULT_TOKENS = (1, 16, 64, 512, 2048, 8192, 32768)
ROUTINGS = ("random", "balanced", "zipf")
OPS = ("fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2")

HEADLINE_TOKENS = 8192
# What two cores compute in two minutes.
CPU_MODELS = ("demo", "olmoe")
CPU_TOKENS = (16, 256)
CPU_HEADLINE_TOKENS = 256
DECODE_TOKENS = 64  # this many tokens and fewer are decoding
# Nobody trains on a handful of tokens: gradients are measured from here on.
LEAST_GRADIENT_TOKENS = 64


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    topk: int
    hidden: int
    intermediate: int

    def weight_shape(self, op: str) -> tuple[int, int, int]:
        """[E, N, K] of the first (gate and up together) or second GEMM of a layer."""
        if op.endswith("1"):
            return self.experts, 2 * self.intermediate, self.hidden
        return self.experts, self.hidden, self.intermediate


@dataclass(frozen=True)
class Case:
    model: Model
    tokens: int
    routing: str
    op: str

    @property
    def rows(self) -> int:
        """M: the rows that all experts compute together."""
        return self.tokens * self.model.topk

    @property
    def product(self) -> str:
        return {"fwd": "forward", "dx": "dX", "dw": "dW"}[self.op[:-1]]

    @property
    def first(self) -> bool:
        """The first GEMM of a layer, whose X is read by token, or the second, whose Y is stored in flat order."""
        return self.op.endswith("1")

    @property
    def scatters(self) -> bool:
        """Whether rows are computed in expert order and stored in flat order."""
        return self.op in ("fwd2", "dx1")

    @property
    def flops(self) -> float:
        _, n, k = self.model.weight_shape(self.op)
        return 2.0 * self.rows * n * k

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.model.name, self.tokens, self.routing, self.op

    @property
    def weights_key(self) -> tuple[str, bool] | None:
        """Cases that are equal here can share weights; dW reads none."""
        return None if self.product == "dW" else (self.model.name, self.first)

    def __str__(self) -> str:
        return f"{self.model.name} T={self.tokens} {self.routing} {self.op}"


def read_catalogue() -> dict[str, Model]:
    """The models by name, in the file's order."""
    path = next((place for place in _PLACES if place.is_file()), _PLACES[0])
    listed = json.loads(path.read_text())["models"]
    return {m["name"]: Model(m["name"], m["experts"], m["topk"], m["hidden"], m["intermediate"]) for m in listed}


def importance(tokens: int, headline: int) -> int:
    if tokens == headline:
        return 0
    return 1 if tokens <= DECODE_TOKENS else 2


def small_gradients(tokens: Iterable[int], ops: Iterable[str], least: int) -> str:
    """What `ordered_cases` leaves out, in words; nothing if it takes everything."""
    gradients = [op for op in OPS if op in set(ops) and not op.startswith("fwd")]
    small = sorted(count for count in set(tokens) if count < least)
    return f"{','.join(gradients)} with {','.join(map(str, small))} tokens" if gradients and small else ""


def ordered_cases(
    models: Sequence[Model],
    tokens: Iterable[int],
    routings: Iterable[str],
    ops: Iterable[str],
    headline: int = HEADLINE_TOKENS,
    least: int = LEAST_GRADIENT_TOKENS,
) -> list[Case]:
    """Random routing before the others, the headline's token count before decoding before the rest: a run that ends
    early has measured what matters. Inside a tier the cases that share weights follow each other. Gradients
    from `least` tokens on."""
    wanted = set(ops)
    cases = [
        Case(model, count, routing, op)
        for model in models
        for count in set(tokens)
        for routing in dict.fromkeys(routings)
        for op in OPS
        if op in wanted and (op.startswith("fwd") or count >= least)
    ]
    place = {model.name: i for i, model in enumerate(models)}
    return sorted(
        cases,
        key=lambda c: (
            c.routing != "random",
            importance(c.tokens, headline),
            place[c.model.name],
            c.op[-1],
            c.tokens,
            ROUTINGS.index(c.routing),
            OPS.index(c.op),
        ),
    )
