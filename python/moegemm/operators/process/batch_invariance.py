"""Whether a row's bits may depend on the kernel that was chosen for the batch around it."""

from collections.abc import Iterator
from contextlib import contextmanager

from moegemm.operators.errors import explain, shown
from moegemm.operators.loading import ops


def set_batch_invariant(on: bool) -> bool:
    """True, the default, keeps to kernels that sum in the one order of their backend: a row's bits then depend on that
    row and its expert's weights alone. False lets all later calls of this process take faster kernels that sum in an
    order of their own; results stay deterministic. Returns what held before. `MOEGEMM_BATCH_INVARIANT=0` begins with
    False.

    >>> import moegemm
    >>> moegemm.set_batch_invariant(False)
    True
    >>> moegemm.set_batch_invariant(True)
    False
    """
    if not isinstance(on, bool):
        raise TypeError(f"on is {shown(on)}; True and False are accepted")
    try:
        before: bool = ops.set_batch_invariant(on)
    except RuntimeError as error:
        raise explain(error, {}) from None
    return before


@contextmanager
def batch_invariant(on: bool) -> Iterator[None]:
    """set_batch_invariant for a `with` block."""
    before = set_batch_invariant(on)
    try:
        yield
    finally:
        set_batch_invariant(before)
