"""What holds for all later calls of this process: which kernels they may take, and how much of a GPU."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from moegemm.operators.errors import explain
from moegemm.operators.loading import ops
from moegemm.operators.rules import require_bool, require_integer

_MOST_MULTIPROCESSORS = 2**31 - 1  # an int of the library
_Value = TypeVar("_Value", bool, int)


def _ask(operator: Callable[[_Value], _Value], value: _Value) -> _Value:
    """Sets it; returns what held before."""
    try:
        return operator(value)
    except RuntimeError as error:
        raise explain(error, {}) from None


@contextmanager
def _within(set_to: Callable[[_Value], _Value], value: _Value) -> Iterator[None]:
    before = set_to(value)
    try:
        yield
    finally:
        set_to(before)


def set_batch_invariant(on: bool) -> bool:
    """True, the default, keeps to kernels that sum in the one order of their backend: a row's bits then depend on that
    row and its expert's weights alone. False admits kernels with an order of their own to all later calls of this
    process. There is none today, so that plans and results are the same either way. Returns what held before.
    `MOEGEMM_BATCH_INVARIANT=0` begins with False.

    >>> import moegemm
    >>> moegemm.set_batch_invariant(False)
    True
    >>> moegemm.set_batch_invariant(True)
    False
    """
    require_bool("on", on)
    return _ask(ops.set_batch_invariant, on)


def batch_invariant(on: bool) -> AbstractContextManager[None]:
    """set_batch_invariant for a `with` block."""
    return _within(set_batch_invariant, on)


def set_max_multiprocessors(most: int) -> int:
    """Lets the products of all later calls in this process take at most so many multiprocessors of a GPU, so that
    exchange kernels can run beside them; 0: all. Returns what held before. Results have the same bits.

    >>> import moegemm
    >>> moegemm.set_max_multiprocessors(112)
    0
    >>> moegemm.set_max_multiprocessors(0)
    112
    """
    require_integer("max_multiprocessors", most, 0, _MOST_MULTIPROCESSORS, " (all)")
    return _ask(ops.set_max_multiprocessors, most)


def max_multiprocessors(most: int) -> AbstractContextManager[None]:
    """set_max_multiprocessors for a `with` block."""
    return _within(set_max_multiprocessors, most)
