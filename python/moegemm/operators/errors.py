"""Gives errors that came through torch as RuntimeError their Python type back."""

import re
import reprlib
from collections.abc import Mapping
from typing import Final

import torch

from moegemm.operators.packed import Packed
from moegemm.sharded import is_distributed

_TYPES: Final[dict[str, type[Exception]]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
    "OutOfMemoryError": torch.OutOfMemoryError,
}
_TAGGED: Final = re.compile(r"\[(\w+Error)\] (.*)", re.DOTALL)

_short: Final = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict, _short.maxother = 2, 3, 3, 3, 80


def shown(value: object) -> str:
    """The value in a message: enough to recognise it, never a whole array."""
    shape = getattr(value, "shape", None)
    return _short.repr(value) if not shape else f"an array of shape {list(shape)}"


def no_tensor(name: str, value: object) -> TypeError:
    if value is None:
        return TypeError(f"{name} is None; a torch.Tensor is accepted")
    return TypeError(f"{name} is {shown(value)} of type {type(value).__name__}; a torch.Tensor is accepted")


def _distributed(name: str) -> TypeError:
    return TypeError(
        f"{name} is a DTensor; a tensor of one device is accepted: give {name}.to_local() and make a DTensor of the "
        "result where one is needed"
    )


def explain(
    error: Exception, tensors: Mapping[str, object], topk: object = 1, sizes_name: str = "m_sizes"
) -> Exception:
    """The exception to raise for `error`, met while running an operator on these arguments. `sizes_name`: what the
    caller knows m_sizes as."""
    if isinstance(error, NotImplementedError) and torch.compiler.is_compiling():  # ours; Dynamo traces no more of this
        return error
    tagged = _TAGGED.match(str(error))
    if tagged and tagged[1] in _TYPES:
        return _TYPES[tagged[1]](tagged[2].replace("m_sizes", sizes_name))
    for name, value in tensors.items():
        if value is not None and not isinstance(value, torch.Tensor | Packed):
            return no_tensor(name, value)
        if is_distributed(value):
            return _distributed(name)
    for name in ("X", "W", "dY", "m_sizes", "expert_ids", "rows"):
        if name in tensors and tensors[name] is None:
            return no_tensor(name, None)
    if not isinstance(topk, int):
        return TypeError(f"topk is {shown(topk)} of type {type(topk).__name__}; an int is accepted")
    return error
