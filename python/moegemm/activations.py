"""The activations of an expert by name, and as the numbers that the operators take."""

import math
import sys
from typing import Final, NamedTuple

from moegemm.operators.errors import shown

_FUNCTIONS: Final = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3}  # ActivationFunction
_LAYOUTS: Final = {"none": 0, "concatenated": 1, "interleaved": 2}  # GateLayout
NO_LIMIT: Final = sys.float_info.max  # infinite once it is a float


class Activation(NamedTuple):
    """include/moegemm/activation.h: act = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)."""

    function: int
    layout: int
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    # Methods: Dynamo in torch 2.10 does not see a named tuple's properties.
    def gated(self) -> bool:
        return self.layout != 0

    def numbers(self) -> tuple[int, int, float, float, float]:
        """What the operators take. Dynamo (torch 2.11) reads the fields of a named tuple that it got from a constant
        function, but does not unpack it. No limit is a number that is one in fp32 only: compiled packages (AOTInductor)
        keep their constants as JSON, which has no infinity."""
        return self.function, self.layout, self.alpha, min(self.limit, NO_LIMIT), self.up_offset


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
        _FUNCTIONS[function],
        _LAYOUTS[layout] if gated else 0,
        own_alpha if alpha is None else float(alpha),
        own_limit if limit is None else float(limit),
        own_offset if up_offset is None else float(up_offset),
    )
