"""The activations of an expert by name, and as the text that the operators take."""

import math
from typing import Final, NamedTuple

from moegemm.operators.errors import shown

UNGATED: Final = "none"  # the layout of an activation without a gate


class Activation(NamedTuple):
    """include/moegemm/activation.h: act = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)."""

    function: str
    layout: str
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    # Methods: Dynamo in torch 2.10 does not see a named tuple's properties.
    def gated(self) -> bool:
        return self.layout != UNGATED

    def text(self) -> str:
        """What the operators take: "silu/concatenated", and the numbers that are not the defaults."""
        text = self.function + "/" + self.layout
        if self.alpha != 1.0:
            text += " alpha=" + str(self.alpha)
        if self.limit != math.inf:
            text += " limit=" + str(self.limit)
        if self.up_offset != 0.0:
            text += " up_offset=" + str(self.up_offset)
        return text


def activated_columns(activation: str, columns: int) -> int:
    """The columns after an activation given as text."""
    return columns if "/" + UNGATED in activation else columns // 2


# Name: function, whether a gate multiplies, and the defaults of alpha, limit and up_offset.
_NAMED: Final[dict[str, tuple[str, bool, float, float, float]]] = {
    "swiglu": ("silu", True, 1.0, math.inf, 0.0),
    "geglu": ("gelu", True, 1.0, math.inf, 0.0),
    "geglu_tanh": ("gelu_tanh", True, 1.0, math.inf, 0.0),
    "clamped_swiglu": ("silu", True, 1.702, 7.0, 1.0),
    "silu": ("silu", False, 1.0, math.inf, 0.0),
    "gelu": ("gelu", False, 1.0, math.inf, 0.0),
    "gelu_tanh": ("gelu_tanh", False, 1.0, math.inf, 0.0),
    "relu2": ("relu2", False, 1.0, math.inf, 0.0),
}


def activation_named(
    name: str | Activation, layout: str, alpha: float | None, limit: float | None, up_offset: float | None
) -> Activation:
    """The activation of that name; None leaves a number at the name's default."""
    if isinstance(name, Activation):
        return name
    if not isinstance(name, str) or name not in _NAMED:
        raise ValueError(f"activation is {shown(name)}; accepted are {', '.join(_NAMED)}")
    if layout not in ("concatenated", "interleaved"):
        raise ValueError(f"layout is {shown(layout)}; accepted are 'concatenated' and 'interleaved'")
    function, gated, own_alpha, own_limit, own_offset = _NAMED[name]
    for argument, value in (("alpha", alpha), ("up_offset", up_offset)):
        if value is not None and function != "silu":
            raise ValueError(f"{argument} is {value} with activation {name!r}; only SiLU and its gated forms take it")
    return Activation(
        function,
        layout if gated else UNGATED,
        own_alpha if alpha is None else float(alpha),
        own_limit if limit is None else float(limit),
        own_offset if up_offset is None else float(up_offset),
    )
