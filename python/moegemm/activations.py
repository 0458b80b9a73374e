"""The activations of an expert by name, and as what the operators take."""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor

from moegemm.operators.errors import shown
from moegemm.operators.rules import is_number


class Function(NamedTuple):
    """A function of include/moegemm/epilogue.h as torch has it: formula(g, alpha)."""

    formula: Callable[[Tensor, float], Tensor]
    takes_alpha: bool = False


FUNCTIONS: Final = {
    "silu": Function(lambda g, alpha: g * torch.sigmoid(alpha * g), takes_alpha=True),
    "gelu": Function(lambda g, alpha: F.gelu(g)),
    "gelu_tanh": Function(lambda g, alpha: F.gelu(g, approximate="tanh")),
    "relu2": Function(lambda g, alpha: F.relu(g) ** 2),
    "relu": Function(lambda g, alpha: F.relu(g)),
}
GATED_LAYOUTS: Final = ("concatenated", "interleaved")


class Activation(NamedTuple):
    """include/moegemm/epilogue.h: act = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)."""

    function: str  # of FUNCTIONS
    layout: str  # of GATED_LAYOUTS, or "none"
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    # Methods: Dynamo in torch 2.10 does not see a named tuple's properties.
    def gated(self) -> bool:
        return self.layout != "none"

    def text(self) -> str:
        """What the operators take: "silu/concatenated", then the numbers that are not the defaults."""
        words = f"{self.function}/{self.layout}"
        if self.alpha != 1.0:
            words += f" alpha={_constant(self.alpha)}"
        if self.limit != math.inf:
            words += f" limit={_constant(self.limit)}"
        if self.up_offset != 0.0:
            words += f" up_offset={_constant(self.up_offset)}"
        return words


def _constant(number: float) -> float:
    """The number. Dynamo turns one that changes between calls into a symbol, which no text can hold; hex() makes a
    constant of it again."""
    return float.fromhex(float(number).hex())


def is_gated(text: str) -> bool:
    """Whether an activation that is written so has a gate."""
    return "/none" not in text


class _Named(NamedTuple):
    """Numbers as texts, empty for those of Activation: of floats Dynamo may make symbols, and compile again once it
    finds them to be constants."""

    function: str
    gated: bool
    alpha: str = ""
    limit: str = ""
    up_offset: str = ""


_NAMED: Final = {
    "swiglu": _Named("silu", gated=True),
    "geglu": _Named("gelu", gated=True),
    "geglu_tanh": _Named("gelu_tanh", gated=True),
    "reglu": _Named("relu", gated=True),
    "clamped_swiglu": _Named("silu", gated=True, alpha="1.702", limit="7", up_offset="1"),
    "silu": _Named("silu", gated=False),
    "gelu": _Named("gelu", gated=False),
    "gelu_tanh": _Named("gelu_tanh", gated=False),
    "relu2": _Named("relu2", gated=False),
    "relu": _Named("relu", gated=False),
}


def activation_named(
    name: str | Activation, layout: str, alpha: float | None, limit: float | None, up_offset: float | None
) -> Activation:
    """The activation of that name; None leaves a number at the name's default."""
    if isinstance(name, Activation):
        return name
    if not isinstance(name, str) or name not in _NAMED:
        raise ValueError(f"activation is {shown(name)}; accepted are {', '.join(_NAMED)}")
    if layout not in GATED_LAYOUTS:
        raise ValueError(f"layout is {shown(layout)}; accepted are 'concatenated' and 'interleaved'")
    for argument, value in (("alpha", alpha), ("limit", limit), ("up_offset", up_offset)):
        if value is not None and not is_number(value):
            raise TypeError(
                f"{argument} is {shown(value)} of type {type(value).__name__}; a number or None is accepted"
            )
    named = _NAMED[name]
    for argument, value in (("alpha", alpha), ("up_offset", up_offset)):
        if value is not None and not FUNCTIONS[named.function].takes_alpha:
            raise ValueError(f"{argument} is {value} with activation {name!r}; only SiLU and its gated forms take it")
    if up_offset is not None and not named.gated:
        raise ValueError(
            f"up_offset is {up_offset} with activation {name!r}, which has no up; only gated forms take it"
        )
    return Activation(
        named.function,
        layout if named.gated else "none",
        float(alpha) if alpha is not None else float(named.alpha) if named.alpha else 1.0,
        float(limit) if limit is not None else float(named.limit) if named.limit else math.inf,
        float(up_offset) if up_offset is not None else float(named.up_offset) if named.up_offset else 0.0,
    )
