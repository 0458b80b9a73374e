"""Measuring kernels during a call: what calls with autotune=True do besides calling their operator.

A measurement takes at most two seconds per problem, shows a bar on a terminal, keeps what it found when interrupted
and is remembered, in the process and in a file. It never runs while torch records operations instead of running them,
nor during CUDA graph capture, nor with MOEGEMM_AUTOTUNE=0 in the environment.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch

from moegemm.operators.loading import ops
from moegemm.operators.options import AUTOTUNE
from moegemm.operators.process.notes import warn_of_replaced_kernels

_is_compiling = torch.compiler.is_compiling
_torch: Any = torch
_Callback: Any = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_double,
    ctypes.c_double,
    ctypes.c_double,
)

REDRAW_SECONDS = 0.05


class Bar:
    """One line on a terminal: problem, candidate, best so far, time left. Silent elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: Any = None

    def draw(
        self, problem: str, kernel: str, number: int, count: int, best: str, best_us: float, done: float, left: float
    ) -> None:
        if not self._stream.isatty():
            return
        if self._drawn is None:
            from tqdm import tqdm  # here: most processes never show a bar, and import moegemm stays quick

            self._drawn = tqdm(
                total=1.0, bar_format="[{bar:20}] {desc}", file=self._stream, leave=False, dynamic_ncols=True,
                mininterval=REDRAW_SECONDS, miniters=0,
            )  # fmt: skip
        found = f"{best} {best_us:.1f} us" if best else "-"
        line = f"{problem}: {number}/{count} {kernel}; best {found}; {left:.1f} s left"
        self._drawn.set_description_str(line, refresh=False)
        self._drawn.update(done - self._drawn.n)

    def erase(self) -> None:
        drawn, self._drawn = self._drawn, None
        if drawn is not None:
            drawn.close()


class OfThread(threading.local):
    """What belongs to the thread that measures: others may measure in between."""

    listener: Callable[[dict[str, Any]], object] | None = None
    error: BaseException | None = None


class Watch:
    """Called by the library before each timed launch. An exception (Ctrl-C too) ends the measurement, which keeps what
    it found; `settle` raises it afterwards."""

    def __init__(self) -> None:
        self.bar = Bar(sys.stderr)
        self.mine = OfThread()
        self._callback = _Callback(self._progress)
        ops.set_tune_progress(ctypes.cast(self._callback, ctypes.c_void_p).value)

    def _progress(
        self, problem: bytes, kernel: bytes, number: int, count: int, best: bytes, best_us: float, done: float,
        left: float,
    ) -> int:  # fmt: skip
        # An exception must not leave a function that C++ calls.
        try:
            words = problem.decode(), kernel.decode(), number, count, best.decode(), best_us, done, left
            self.bar.draw(*words)
            if self.mine.listener is not None:
                names = ("problem", "kernel", "candidate", "candidates", "best", "best_us", "done", "seconds_left")
                return 0 if self.mine.listener(dict(zip(names, words, strict=True))) is False else 1
        except BaseException as error:
            self.mine.error = error
            return 0
        return 1

    @contextmanager
    def listening(self, listener: Callable[[dict[str, Any]], object] | None) -> Iterator[None]:
        """Measurements of this thread tell `listener`, inside."""
        before, self.mine.listener = self.mine.listener, listener
        try:
            yield
        finally:
            self.mine.listener = before
            self.bar.erase()

    def settle(self) -> None:
        """After a call that may have measured: erases the bar and raises what ended the measurement."""
        self.bar.erase()
        error, self.mine.error = self.mine.error, None
        if error is not None:
            raise error


_watch: Watch | None = None


def installed_watch() -> Watch:
    """The process's watch, which the library calls from now on."""
    global _watch
    if _watch is None:
        _watch = Watch()
    return _watch


def autotune_word() -> str:
    """AUTOTUNE, or nothing while torch records operations on real tensors. A compiled graph keeps the word: it measures
    when it runs, not while it is traced."""
    if _is_compiling():
        return AUTOTUNE
    if _torch.jit.is_tracing() or _torch._C._get_dispatch_mode(_torch._C._TorchDispatchModeKey.PROXY) is not None:
        return ""
    installed_watch()
    return AUTOTUNE


def after_chosen_kernel(stacklevel: int) -> None:
    """What a call with a config or AUTOTUNE does at its end, unless it is traced."""
    if _watch is not None:
        _watch.settle()
    warn_of_replaced_kernels(stacklevel=stacklevel + 1)
