"""Puts back the Python type of errors that travelled through torch as RuntimeError."""

import re
from collections.abc import Mapping
from typing import Final

import torch

_TYPES: Final[dict[str, type[Exception]]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
}
_TAGGED: Final = re.compile(r"\[(\w+Error)\] (.*)", re.DOTALL)


class UnderAutocastError(RuntimeError):
    """forward_plain was called where autocast would have it cast its operands, which is not the operator's business:
    the casts have gradients of their own."""


def explain(error: Exception, tensors: Mapping[str, object], topk: object = 1) -> Exception:
    """The exception to raise for `error`, met while running an operator on these arguments."""
    tagged = _TAGGED.match(str(error))
    if tagged and tagged[1] in _TYPES:
        return _TYPES[tagged[1]](tagged[2])
    for name, value in tensors.items():
        if value is not None and not isinstance(value, torch.Tensor):
            return TypeError(f"{name} is {value!r} of type {type(value).__name__}; a torch.Tensor is accepted")
    for name in ("X", "W", "dY", "m_sizes", "expert_ids", "rows"):
        if name in tensors and tensors[name] is None:
            return TypeError(f"{name} is None; a torch.Tensor is accepted")
    if not isinstance(topk, int):
        return TypeError(f"topk is {topk!r} of type {type(topk).__name__}; an int is accepted")
    return error
