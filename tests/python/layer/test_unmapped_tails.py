"""Rows that tails="undefined" leaves alone may be memory that nobody may touch: a process that does so ends."""

import ctypes
import itertools
import mmap
import signal
import subprocess
import sys

import moegemm
import pytest
import torch

PAGE = mmap.PAGESIZE
EXPERTS, CAPACITY, INNER = 3, 6, 17
ROWS = EXPERTS * CAPACITY
SIZES = torch.tensor([4, 0, 6])
PLACED = torch.tensor([r < 4 or r >= 2 * CAPACITY for r in range(ROWS)])
PACKED = torch.arange(ROWS) < 10
LAYOUTS = {
    "packed": (PACKED, {"sizes": SIZES}),
    "ends": (PACKED, {"sizes": SIZES.cumsum(0).view(1, -1)}),
    "placed": (PLACED, {"sizes": SIZES, "starts": torch.arange(EXPERTS) * CAPACITY}),
    "masked": (PLACED, {"sizes": SIZES.int()}),
}


class Pages:
    """Rows of a page each."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = mmap.mmap(-1, ROWS * PAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.rows = torch.frombuffer(self._memory, dtype=dtype).view(ROWS, -1)
        self.rows.copy_(torch.randn(self.rows.shape))

    def forbid(self, inside: torch.Tensor) -> None:
        """Any access to the other rows from now on."""
        libc = ctypes.CDLL(None)
        for row in (~inside).nonzero().flatten().tolist():
            assert libc.mprotect(ctypes.c_void_p(self._address + row * PAGE), PAGE, 0) == 0


def run(layout: str, dtype: torch.dtype, pair: bool, biased: bool, weighted: bool, tails: str) -> None:
    inside, segments = LAYOUTS[layout]
    pages = [Pages(dtype) for _ in range(4)]
    hidden = pages[0].rows.size(1)
    first = (torch.randn(EXPERTS, 2 * INNER, hidden) / hidden).to(dtype).requires_grad_()
    second = torch.randn(EXPERTS, hidden, INNER).to(dtype).requires_grad_()
    biases = [torch.randn(EXPERTS, n).to(dtype).requires_grad_() for n in (2 * INNER, hidden)] if biased else [None] * 2
    weights = torch.rand(ROWS).requires_grad_() if weighted else None
    for each in pages:
        each.forbid(inside)
    rows, out, grad_rows, d_out = (each.rows for each in pages)
    rows.requires_grad_()
    shape = (EXPERTS, CAPACITY) if layout == "masked" else (ROWS,)
    result = moegemm.experts_mlp(
        rows.unflatten(0, shape), first.chunk(2, 1) if pair else first, second, **segments, tails=tails,
        row_weights=None if weights is None else weights.view(shape), gate_up_bias=biases[0], down_bias=biases[1],
        out=out.unflatten(0, shape), grad_rows_out=grad_rows.unflatten(0, shape),
    )  # fmt: skip
    given = [t for t in (rows, first, second, weights, *biases) if t is not None]
    gradients = torch.autograd.grad(result, given, d_out.unflatten(0, shape))
    assert all(g.isfinite().all() for g in gradients[1:3])


def main(tails: str) -> None:
    for layout, *more in itertools.product(LAYOUTS, (torch.float32, torch.bfloat16), *[(False, True)] * 3):
        run(layout, *more, tails)


@pytest.mark.parametrize("tails", ["undefined", "zero"])
def test_undefined_tails_are_neither_read_nor_written(tails):
    done = subprocess.run([sys.executable, __file__, tails], capture_output=True, text=True)
    assert done.returncode == (0 if tails == "undefined" else -signal.SIGSEGV), done.stderr


if __name__ == "__main__":
    main(sys.argv[1])
