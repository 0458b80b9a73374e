"""Whether products may sum a contraction in another order than their backend's own."""

from collections.abc import Iterator
from contextlib import contextmanager

from moegemm.operators.errors import explain
from moegemm.operators.loading import ops


def set_batch_invariant(invariant: bool) -> bool:
    """Whether a row's bits must not depend on the other rows of a call, in all later calls of this process. Returns
    what held before: True, unless MOEGEMM_BATCH_INVARIANT=0 says otherwise.

    With False the planner may take kernels that add up in another order, where they are faster. The same call still
    gives the same bits.

    >>> import moegemm
    >>> moegemm.set_batch_invariant(False)
    True
    >>> moegemm.set_batch_invariant(True)
    False
    """
    if not isinstance(invariant, bool):
        raise TypeError(f"invariant is {invariant!r}; True and False are accepted")
    try:
        before: bool = ops.set_batch_invariant(invariant)
    except RuntimeError as error:  # the environment's word
        raise explain(error, {}) from None
    return before


@contextmanager
def batch_invariant(invariant: bool) -> Iterator[None]:
    """set_batch_invariant for a `with` block."""
    before = set_batch_invariant(invariant)
    try:
        yield
    finally:
        set_batch_invariant(before)
