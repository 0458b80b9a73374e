"""Warnings of the library: which kernel runs instead of the one that was asked for, and what it worked around."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

_ops: Any = torch.ops.moegemm
_take_notes: Callable[[], str] = _ops.take_notes.default


def warn_of_replaced_kernels(stacklevel: int) -> None:
    """Warns of what the last calls noted; the library notes each replacement once per process."""
    for note in _take_notes().splitlines():
        warnings.warn(f"moegemm: {note}", UserWarning, stacklevel=stacklevel + 1)
