"""Warnings of the library: which kernel runs instead of the one that was asked for, and what it worked around."""

import warnings
from collections.abc import Callable

from moegemm.operators.loading import ops

_take_notes: Callable[[], str] = ops.take_notes.default


def warn_of_replaced_kernels(stacklevel: int) -> None:
    """Warns of what the last calls noted; the library notes each replacement once per process."""
    for note in _take_notes().splitlines():
        warnings.warn(f"moegemm: {note}", UserWarning, stacklevel=stacklevel + 1)
