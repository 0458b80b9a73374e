"""Finds out which activation a module applies, by asking it.

A model's class says what it does between its two products in Python code of its own. Reading names or source would
break with the next release; so the module's function is run on a few numbers and compared with what the kernels
compute. What matches nothing is left to the module.
"""

import itertools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor

from moegemm.activations import Activation

_FUNCTIONS: list[Callable[[Tensor, float], Tensor]] = [  # in the order of ActivationFunction
    lambda g, alpha: g * torch.sigmoid(alpha * g),
    lambda g, alpha: F.gelu(g),
    lambda g, alpha: F.gelu(g, approximate="tanh"),
    lambda g, alpha: F.relu(g) ** 2,
]
_SILU = 0
_ALPHA_NAMES, _LIMIT_NAMES = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
_NUMBER_NAMES = (*_ALPHA_NAMES, *_LIMIT_NAMES)
_CACHE_NAME = "_moegemm_activation"
# The closest pair, GELU and its tanh form, differ by 4e-4; fp32 evaluations of one by less than 1e-5.
_TOLERANCE = 2e-5


def evaluate(activation: Activation, h: Tensor) -> Tensor:
    """The definition in include/moegemm/activation.h."""
    if not activation.gated:
        return _FUNCTIONS[activation.function](h.clamp(max=activation.limit), activation.alpha)
    gate, up = (h[..., ::2], h[..., 1::2]) if activation.layout == 2 else h.chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return _FUNCTIONS[activation.function](gate, activation.alpha) * (up + activation.up_offset)


def _numbers(module: Any, names: tuple[str, ...], default: float) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [default, *(float(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool))]


def _candidates(module: Any, gated: bool) -> Iterator[Activation]:
    alphas = _numbers(module, _ALPHA_NAMES, 1.0)
    limits = [limit for limit in _numbers(module, _LIMIT_NAMES, math.inf) if limit > 0]
    layouts = (1, 2) if gated else (0,)
    offsets = (0.0, 1.0) if gated else (0.0,)
    for function, layout, limit, offset in itertools.product(range(len(_FUNCTIONS)), layouts, limits, offsets):
        for alpha in alphas if function == _SILU else [1.0]:
            yield Activation(function, layout, alpha, limit, offset)


def _probe(own: Callable[[Tensor], Any], module: Any, gated: bool) -> Activation | None:
    """The activation that computes what `own` does, with the numbers that `module` has as attributes."""
    # 24 rows of 2 * 8 numbers on both sides of every limit in use, the same ones each time.
    numbers = torch.arange(24 * 16, dtype=torch.float64).mul(0.7548776662466927).remainder(1.0)
    h = (numbers * 40 - 20).view(24, 16).float()
    try:
        given = own(h)
    except Exception:  # not our code: whatever it raises on the CPU, it is not a plain activation
        return None
    if not isinstance(given, Tensor):
        return None
    for candidate in _candidates(module, gated):
        expected = evaluate(candidate, h.double())
        if given.shape == expected.shape and torch.allclose(given.double(), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return candidate
    return None


def _probe_aside(own: Callable[[Tensor], Any], module: Any, gated: bool) -> Activation | None:
    """The same, whatever modes the caller is in."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        return _probe(own, module, gated)


def _activation_of_class(
    module_class: Any, act_class: Any, approximate: str | None, gated: bool, *numbers: float | None
) -> Activation | None:
    """The same for a module of which only constants are known: a stand-in with those is asked."""
    stand_in = types.SimpleNamespace()
    for name, number in zip(_NUMBER_NAMES, numbers, strict=True):
        if number is not None:
            setattr(stand_in, name, number)
    if act_class is not None:
        try:
            stand_in.act_fn = act_class()
        except TypeError:
            return None
        if approximate is not None:
            stand_in.act_fn.approximate = approximate
    own = getattr(module_class, "_apply_gate", None)
    if gated and own is not None:
        return _probe_aside(lambda h: own(stand_in, h), stand_in, gated)
    return None if gated or act_class is None else _probe_aside(stand_in.act_fn, stand_in, gated)


def _text_of_activation_of_class(*arguments: Any) -> str:
    """The same as text, "" for None: the one kind of constant that torch 2.11 takes apart while tracing."""
    found = _activation_of_class(*arguments)
    return "" if found is None else " ".join(map(repr, found))


# What torch.compiler.assume_constant_result does, without importing all of Dynamo: run while tracing, on constants.
_text_of_activation_of_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _constant(module: Any, name: str) -> float | None:
    value = getattr(module, name, None)
    return value if isinstance(value, int | float) else None


def activation_of(module: Any, gated: bool) -> Activation | None:
    """The activation between the module's two products, or None if the kernels have none like it. Asked once."""
    if hasattr(module, _CACHE_NAME):
        return module._moegemm_activation  # type: ignore[no-any-return]
    act_fn = getattr(module, "act_fn", None)
    if torch.compiler.is_compiling():
        act_class = None if act_fn is None else type(act_fn)
        numbers = [_constant(module, name) for name in _NUMBER_NAMES]
        text = _text_of_activation_of_class(
            type(module), act_class, getattr(act_fn, "approximate", None), gated, *numbers
        )
        if not text:
            return None
        function, layout, alpha, limit, up_offset = text.split(" ")
        return Activation(int(function), int(layout), float(alpha), float(limit), float(up_offset))
    own: Any = getattr(module, "_apply_gate", None) if gated else act_fn
    found = None if own is None else _probe_aside(own, module, gated)
    module.__dict__[_CACHE_NAME] = found
    return found
