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
from torch import Tensor, nn

from moegemm.activations import FUNCTIONS, GATED_LAYOUTS, Activation
from moegemm.operators.rules import is_number

# Where modules keep their numbers. Any other number that a module reads while it is asked is found as well.
NUMBER_NAMES = ("alpha", "swiglu_alpha", "limit", "swiglu_limit", "gate_softcap", "up_softcap")
_NONE = "None"  # of one that is there and has no value
_CACHE_NAME = "_moegemm_asked"
# The closest pair, GELU and its tanh form, differ by 4e-4; fp32 evaluations of one by less than 1e-5.
_TOLERANCE = 2e-5
# Beyond the limits that no attribute tells of; relu(gate)^2 * up stays finite in fp32.
_WIDE_SCALES = tuple(4 * 10 ** (power / 2) for power in range(2, 16))


def split_gate(h: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The gates and the ups of rows that hold both."""
    if layout == "interleaved":
        return h[..., ::2], h[..., 1::2]
    gate, up = h.chunk(2, dim=-1)
    return gate, up


def evaluate(activation: Activation, h: Tensor) -> Tensor:
    """The definition in include/moegemm/epilogue.h."""
    if not activation.gated():
        return FUNCTIONS[activation.function].formula(h.clamp(max=activation.limit), activation.alpha)
    gate, up = split_gate(h, activation.layout)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return FUNCTIONS[activation.function].formula(gate, activation.alpha) * (up + activation.up_offset)


def _constants(value: Any) -> dict[str, Any]:
    """The numbers, flags and words that an object keeps, an activation's settings among them."""
    if isinstance(value, type):
        return {}
    return {
        name: held
        for name, held in getattr(value, "__dict__", {}).items()
        if isinstance(held, int | float | str) and name != "training" and not name.startswith("_")
    }


class _Reader:
    """Stands in for a module while it is asked, and notes what its code reads."""

    def __init__(self, module: Any) -> None:
        self.__dict__["_asked_module"] = module
        self.__dict__["_noted"] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._asked_module, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._asked_module:
            return types.MethodType(value.__func__, self)
        self._noted[name] = (value, _constants(value))
        return value


class _Asked:
    """An answer, and what it depends on. A copy or a pickle of a module starts without one."""

    def __init__(self, own: Any = None, noted: dict[str, Any] | None = None, found: Activation | None = None) -> None:
        self.own, self.noted, self.found = own, noted, found

    def __reduce__(self) -> tuple[Any, ...]:
        return _Asked, ()

    def holds(self, module: Any, own: Any) -> bool:
        """Whether the module would read the same again."""
        if self.noted is None or self.own is not own:
            return False
        for name, (value, constants) in self.noted.items():
            now = getattr(module, name, None)
            if now is not value and not (is_number(now) and is_number(value) and now == value):
                return False
            if constants:  # only those that were there: a scan of all would take longer than the rest
                kept = now.__dict__
                for constant, held in constants.items():
                    if kept.get(constant) != held:
                        return False
        return True


def _learns(value: Any) -> bool:
    """Whether what a module read is, or has, weights: no answer about their numbers of today would last."""
    return isinstance(value, Tensor) or (isinstance(value, nn.Module) and any(True for _ in value.parameters()))


def _candidates(numbers: list[float], gated: bool) -> Iterator[Activation]:
    alphas = [1.0, *numbers]
    limits = [math.inf, *(number for number in numbers if number > 0)]
    layouts = GATED_LAYOUTS if gated else ("none",)
    offsets = (0.0, 1.0) if gated else (0.0,)
    for function, layout, limit, offset in itertools.product(FUNCTIONS, layouts, limits, offsets):
        for alpha in alphas if FUNCTIONS[function].takes_alpha else [1.0]:
            yield Activation(function, layout, alpha, limit, offset)


def spread_numbers(count: int) -> Tensor:
    """Of [0, 1), the same ones each time: multiples of an irrational number fill it evenly."""
    return torch.arange(count, dtype=torch.float64).mul(0.7548776662466927).remainder(1.0)


def _arguments(numbers: list[float]) -> tuple[Tensor, Tensor]:
    """Rows of 2 * 8 numbers, the same ones each time, and the error allowed in each.

    24 rows are within 20, where activations differ. The others grow beyond every limit: 2 for each that is known, and
    one for each wide scale.
    """
    near = [20.0] * 24
    far = [scale for number in numbers if 0 < number < 1e18 for scale in (2.0 * number, 8.0 * number)]
    scales = torch.tensor([*near, *far, *_WIDE_SCALES], dtype=torch.float64).unsqueeze(1)
    h = (spread_numbers(scales.size(0) * 16).view(-1, 16) * 2 - 1) * scales
    # fp32 loses what a small activation is made of; the other factor has the row's scale.
    allowed = torch.where(torch.arange(scales.size(0)).unsqueeze(1) < len(near), 1.0, scales.clamp(min=1.0))
    return h.float(), allowed * _TOLERANCE


def _match(own: Callable[[Tensor], Any], numbers: list[float], gated: bool) -> Activation | None:
    """The activation that computes what `own` does, with one of the numbers."""
    h, allowed = _arguments(numbers)
    given = own(h)
    if not isinstance(given, Tensor):
        return None
    given = given.double()
    for candidate in _candidates(numbers, gated):
        expected = evaluate(candidate, h.double()).float().double()
        if given.shape != expected.shape:
            continue
        near = (given - expected).abs() <= allowed + _TOLERANCE * expected.abs()
        if bool((near | (given == expected)).all()):  # equal infinities have no difference
            return candidate
    return None


def _probe(own: Any, module: Any, gated: bool) -> tuple[Activation | None, dict[str, Any]]:
    """The activation of `own`, a method of the module or a function, and what it read."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    reader = _Reader(module)
    if not gated:
        reader._noted["act_fn"] = (own, _constants(own))
    function = types.MethodType(own.__func__, reader) if isinstance(own, types.MethodType) and gated else own
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        try:
            function(torch.ones(1, 16))  # for what it reads
            held = [number for value, constants in reader._noted.values() for number in (value, *constants.values())]
            held += [getattr(module, name, None) for name in NUMBER_NAMES]
            numbers = list(dict.fromkeys(float(number) for number in held if is_number(number)))
            found = _match(function, numbers, gated)
        except Exception:  # not our code: one that raises is not a plain activation
            found = None
    if any(_learns(value) for value, _ in reader._noted.values()):
        found = None
    return found, reader._noted


def _names_of_constants(act_class: Any) -> str:
    """What an activation of this class keeps, or "" if one is not made without arguments."""
    try:
        return " ".join(_constants(act_class()))
    except TypeError:
        return ""


def _text_of_activation_of_class(module_class: Any, act_class: Any, gated: bool, names: str, *constants: Any) -> str:
    """The activation of a module of which only constants are known, as text, "" for none.

    A stand-in with those is asked. Text is the one kind of constant that torch 2.11 takes apart while tracing.
    """
    stand_in = types.SimpleNamespace()
    for name, number in zip(NUMBER_NAMES, constants, strict=False):
        if number is not None:
            value = _from_traced(number)
            setattr(stand_in, name, None if value == _NONE else value)
    if act_class is not None:
        try:
            stand_in.act_fn = act_class()
        except TypeError:
            return ""
        for name, constant in zip(names.split(), constants[len(NUMBER_NAMES) :], strict=True):
            setattr(stand_in.act_fn, name, _from_traced(constant))
    own = getattr(module_class, "_apply_gate", None) if gated else getattr(stand_in, "act_fn", None)
    if own is None:
        return ""
    found, _ = _probe(types.MethodType(own, stand_in) if gated else own, stand_in, gated)
    return "" if found is None else " ".join(map(str, found))


# What torch.compiler.assume_constant_result does, without importing all of Dynamo: run while tracing, on constants.
_names_of_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]
_text_of_activation_of_class._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _traced(value: Any) -> Any:
    """A constant of the graph. Dynamo would make a number that changed once a variable, except to write it as text."""
    if is_number(value):
        return "n" + float(value).hex()
    return "s" + value if isinstance(value, str) else value


def _from_traced(value: Any) -> Any:
    if isinstance(value, str):
        return float.fromhex(value[1:]) if value[0] == "n" else value[1:]
    return value


def _number(module: Any, name: str) -> Any:
    value = getattr(module, name, "")
    if value is None:
        return _NONE
    return value if isinstance(value, int | float) else None


def _while_tracing(module: Any, gated: bool) -> Activation | None:
    """Every constant is read by traced code, so that a change of any compiles again."""
    act_fn = getattr(module, "act_fn", None)
    if "_apply_gate" in module.__dict__:
        return None
    act_class, names, constants = None, "", []
    if act_fn is not None:
        act_class = type(act_fn)
        names = _names_of_constants(act_class)
        constants = [_traced(getattr(act_fn, name)) for name in names.split()]
    numbers = [_traced(_number(module, name)) for name in NUMBER_NAMES]
    text = _text_of_activation_of_class(type(module), act_class, gated, names, *numbers, *constants)
    if not text:
        return None
    function, layout, alpha, limit, up_offset = text.split(" ")
    return Activation(function, layout, float(alpha), float(limit), float(up_offset))


def activation_of(module: Any, gated: bool) -> Activation | None:
    """The activation between the module's two products, or None if the kernels have none like it.

    With `gated` that of `_apply_gate`, else that of `act_fn`. Asked again when something changes that the answer
    depends on.
    """
    if torch.compiler.is_compiling():
        return _while_tracing(module, gated)
    own: Any = getattr(module, "_apply_gate" if gated else "act_fn", None)
    if own is None:
        return None
    # A bound method is made anew by each access.
    identity = own.__func__ if isinstance(own, types.MethodType) else own
    asked: _Asked | None = module.__dict__.get(_CACHE_NAME)
    if asked is None or not asked.holds(module, identity):
        found, noted = _probe(own, module, gated)
        asked = _Asked(identity, noted, found)
        module.__dict__[_CACHE_NAME] = asked
    return asked.found
