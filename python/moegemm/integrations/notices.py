"""Warnings of the integrations, each once per process."""

import contextlib
import warnings
from collections.abc import Iterator

_said: set[str] = set()


def say_once(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"moegemm: {reason}", UserWarning, stacklevel=4)


say_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # while tracing, not in the graph


@contextlib.contextmanager
def unsaid() -> Iterator[None]:
    """Warnings raised inside are neither shown nor remembered as shown."""
    before = set(_said)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _said.intersection_update(before)
