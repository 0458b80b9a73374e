"""The program `moegemm`, from the library that the operators are in: the wheel holds every kernel once."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from moegemm.operators.loading import found_library

CANNOT_RUN = 3  # the program's own exit code for it


def entry(name: str) -> Any:
    """A function of the program; NotImplementedError where the library was built without it."""
    library = found_library()
    try:
        return getattr(ctypes.CDLL(str(library)), name)
    except AttributeError:
        reason = "MOEGEMM_BUILD_CLI was OFF, or CLI11 or fmt was missing"
        raise NotImplementedError(f"{library} was built without the program: {reason}") from None


def c_strings(words: Sequence[str]) -> Any:
    """As main() gets them in C."""
    return (ctypes.c_char_p * (len(words) + 1))(*map(os.fsencode, words), None)


def main() -> None:
    """Runs the program with this process's arguments and exits with its code."""
    try:
        program = entry("moegemm_program")
    except NotImplementedError as error:
        print(f"moegemm: {error}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
    # Python's own handlers would wait for the program to return.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    words = ["moegemm", *sys.argv[1:]]
    sys.exit(program(len(words), c_strings(words)))
