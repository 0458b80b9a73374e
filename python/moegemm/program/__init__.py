"""The program `moegemm`, from the library that the operators are in: the wheel holds every kernel once."""

import ctypes
import os
import signal
import sys

from moegemm.operators.loading import candidates

CANNOT_RUN = 3  # the program's own exit code for it


def main() -> None:
    """Runs the program with this process's arguments and exits with its code."""
    library = next(path for path in candidates() if path.is_file())  # loaded when moegemm was imported
    try:
        program = ctypes.CDLL(str(library)).moegemm_program
    except AttributeError:
        reason = "MOEGEMM_BUILD_CLI was OFF, or CLI11 or fmt was missing"
        print(f"moegemm: {library} was built without the program: {reason}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
    # Python's own handlers would wait for the program to return.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    words = [b"moegemm", *map(os.fsencode, sys.argv[1:])]
    arguments = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    sys.exit(program(len(words), arguments))
