"""How much of a GPU products may take, so that exchange kernels can run beside them."""

from collections.abc import Iterator
from contextlib import contextmanager

from moegemm.operators.errors import explain
from moegemm.operators.loading import ops


def set_max_multiprocessors(most: int) -> int:
    """Lets the products of all later calls in this process take at most so many multiprocessors of a GPU; 0: all.
    Returns what held before. Results have the same bits.

    >>> import moegemm
    >>> moegemm.set_max_multiprocessors(112)
    0
    >>> moegemm.set_max_multiprocessors(0)
    112
    """
    try:
        before: int = ops.set_max_multiprocessors(most)
    except RuntimeError as error:
        raise explain(error, {}) from None
    return before


@contextmanager
def max_multiprocessors(most: int) -> Iterator[None]:
    """set_max_multiprocessors for a `with` block."""
    before = set_max_multiprocessors(most)
    try:
        yield
    finally:
        set_max_multiprocessors(before)
