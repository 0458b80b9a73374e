"""Loads the kernels in the background once this process uses a GPU, so that no call has to wait for it.

The driver loads a kernel at its first launch, half a millisecond each. A process that imports moegemm and then builds
its model has them loaded long before the first layer runs; one that calls at once waits for what is missing, as before.
"""

import atexit
import threading
import time
from collections.abc import Callable

import torch

from moegemm.operators.errors import explain, shown
from moegemm.operators.loading import ops
from moegemm.operators.process.notes import warn_of_replaced_kernels

PATIENCE_SECONDS = 120.0  # a GPU that is not in use by then is not waited for
SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.2

_load: Callable[[int], int] = ops.load_kernels.default
_stop = threading.Event()


def load_kernels(device: torch.device | str | int | None = None) -> int:
    """Loads the kernels of expert layers in bf16 and fp16 onto a GPU now; returns how many there are, 0 on the CPU.

    `device` None is the current GPU, or the CPU where torch sees none.

    It happens in the background anyway, from the moment the process uses the GPU; MOEGEMM_LOAD_EARLY=0 turns that off.

    >>> import moegemm
    >>> moegemm.load_kernels("cpu")
    0
    """
    if device is None and not torch.cuda.is_available():
        return 0
    wanted = torch.device("cuda") if device is None else torch.device(device)
    if wanted.type != "cuda":
        return 0
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {shown(device)}; torch {torch.__version__} sees no CUDA device here")
    torch.cuda.synchronize(wanted)  # makes the context that kernels are loaded into
    return _load(torch.cuda.current_device() if wanted.index is None else wanted.index)


def load_where_used(devices: int) -> None:
    """Loads the kernels on each GPU when this process has a context there; never makes one."""
    waiting = list(range(devices))
    until, wait = time.monotonic() + PATIENCE_SECONDS, SHORTEST_WAIT
    while waiting and time.monotonic() < until and not _stop.wait(wait):
        wait = min(wait * 1.05, LONGEST_WAIT)
        try:
            waiting = [device for device in waiting if _load(device) == 0]
        except RuntimeError:  # a GPU that cannot load them says so where it is used
            return


def _start() -> None:
    thread = threading.Thread(
        target=lambda: load_where_used(torch.cuda.device_count()), name="moegemm-load", daemon=True
    )

    def finish() -> None:  # no CUDA call may be under way while the process tears down
        _stop.set()
        thread.join()

    atexit.register(finish)
    thread.start()


def load_early() -> None:
    """Starts when torch initialises CUDA: nothing here touches a GPU before that. ValueError for a bad
    MOEGEMM_LOAD_EARLY; warns of names that begin with MOEGEMM_ and mean nothing."""
    try:
        wanted: bool = ops.loads_early()
    except RuntimeError as error:
        raise explain(error, {}) from None
    warn_of_replaced_kernels(stacklevel=2)
    when_initialised: Callable[[Callable[[], None]], None] | None = getattr(torch.cuda, "_lazy_call", None)
    if when_initialised is not None and wanted:
        when_initialised(_start)
