"""Finds out which activation a module applies, by asking it.

A model's class says what it does between its two products in Python code of its own. Reading names or source would
break with the next release; so the module's function is run on a few numbers and compared with what the kernels
compute. What matches nothing is left to the module.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn

from moegemm.activations import Activation

_FUNCTIONS: list[Callable[[Tensor, float], Tensor]] = [  # in the order of ActivationFunction
    lambda g, alpha: g * torch.sigmoid(alpha * g),
    lambda g, alpha: F.gelu(g),
    lambda g, alpha: F.gelu(g, approximate="tanh"),
    lambda g, alpha: F.relu(g) ** 2,
]
_SILU = 0
_ALPHA_NAMES, _LIMIT_NAMES = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")
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


def _numbers(module: nn.Module, names: tuple[str, ...], default: float) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [default, *(float(n) for n in found if isinstance(n, int | float) and not isinstance(n, bool))]


def _candidates(module: nn.Module, gated: bool) -> Iterator[Activation]:
    alphas = _numbers(module, _ALPHA_NAMES, 1.0)
    limits = [limit for limit in _numbers(module, _LIMIT_NAMES, math.inf) if limit > 0]
    layouts = (1, 2) if gated else (0,)
    offsets = (0.0, 1.0) if gated else (0.0,)
    for function, layout, limit, offset in itertools.product(range(len(_FUNCTIONS)), layouts, limits, offsets):
        for alpha in alphas if function == _SILU else [1.0]:
            yield Activation(function, layout, alpha, limit, offset)


def _probe(module: nn.Module, gated: bool) -> Activation | None:
    own: Any = getattr(module, "_apply_gate", None) if gated else getattr(module, "act_fn", None)
    if own is None:
        return None
    # 24 rows of 2 * 8 numbers on both sides of every limit in use, the same ones each time.
    numbers = torch.arange(24 * 16, dtype=torch.float64).mul(0.7548776662466927).remainder(1.0)
    h = (numbers * 40 - 20).view(24, 16)
    try:
        given = own(h.float())
    except Exception:  # not our code: whatever it raises on the CPU, it is not a plain activation
        return None
    if not isinstance(given, Tensor):
        return None
    given = given.double()
    for candidate in _candidates(module, gated):
        expected = evaluate(candidate, h.float().double())
        if given.shape == expected.shape and torch.allclose(given, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return candidate
    return None


def activation_of(module: nn.Module, gated: bool) -> Activation | None:
    """The activation between the module's two products, or None if the kernels have none like it. Asked once."""
    known = module.__dict__.get(_CACHE_NAME, False)
    if known is False:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            known = _probe(module, gated)
        module.__dict__[_CACHE_NAME] = known
    return known  # type: ignore[no-any-return]


# What torch.compiler.assume_constant_result does, without importing all of Dynamo: the module is asked while tracing.
activation_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
