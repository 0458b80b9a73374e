"""Who competes: one dense product, torch's grouped_mm with the copies its user makes, a loop over experts, moegemm."""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moegemm
from moegemm.bench.cases import Case
from moegemm.bench.operands import Operands, has_nan, relative_error

_functional: Any = torch.nn.functional
grouped_mm: Callable[..., Tensor] = getattr(_functional, "grouped_mm", None) or torch._grouped_mm

KernelNumbers = tuple[int, int, int, int]  # rows, columns and depth of the tile, stages


@dataclass
class Contender:
    """`roundings` is how often a result is rounded to the dtype on its way: the error it may have."""

    run: Callable[[], Tensor]
    error: Callable[[Tensor], float]
    roundings: int = 1
    poisons: Tensor | None = None  # filled with NaN before the check; nothing may be left of it


class KernelReplacedError(Exception):
    """The library ran another kernel than the one asked for."""


def dense(o: Operands) -> Contender:
    """One product with the FLOPs and the operand majorness of the case, as if there were one expert:
    forward [M, K] x [N, K]^T, dX [M, N] x [N, K], dW [N, M] x [M, K] (one gradient of [N, K] instead of E of them)."""
    if o.case.product == "forward":
        assert o.rows_k is not None
        assert o.W is not None
        a, b = o.rows_k, o.W[0].t()
    elif o.case.product == "dX":
        assert o.rows_n is not None
        assert o.W is not None
        a, b = o.rows_n, o.W[0]
    else:
        assert o.rows_n is not None
        assert o.rows_k is not None
        a, b = o.rows_n.t(), o.rows_k
    out = torch.empty(a.size(0), b.size(1), device=a.device, dtype=a.dtype)
    rows = torch.linspace(0, a.size(0) - 1, min(16, a.size(0)), device=a.device).long()

    def error(result: Tensor) -> float:
        expected = a[rows].float() @ b.float()
        return float((result[rows] - expected).norm() / expected.norm())

    # A product that is split along its contraction may add its parts in the dtype of the result.
    return Contender(lambda: torch.mm(a, b, out=out), error, roundings=3)


def torch_with_copies(o: Operands) -> Contender:
    """grouped_mm wants rows sorted by expert and leaves them so; index_select brings them there and back, and the
    multiply is its own pass. What the router computes once per layer (offsets, int64 indices, inverse) is not
    charged."""
    ends = o.routing.ends

    def run() -> Tensor:
        if o.case.product == "dW":
            return grouped_mm(o.sorted_dy().t(), o.sorted_x(), offs=ends)
        return o.delivered(grouped_mm(o.sorted_rows(), o.weights_as_factor(), offs=ends))

    # Empty experts are not torch's promise.
    return Contender(run, lambda y: relative_error(o, y, with_empty=False), roundings=roundings_with_copies(o))


def roundings_with_copies(o: Operands) -> int:
    """Weight, product and their product are rounded in fwd2."""
    return 2 if o.row_weights is None else 3


def expert_loop(o: Operands, *, fresh: bool = False) -> Contender:
    """One torch.mm per expert that has rows, with the same copies around it. The segment sizes are on the host
    already, which a real layer would have to wait for. `fresh`: each call allocates its result."""
    segments = list(o.routing.segments())
    filled = [s for s in segments if s[2] > s[1]]
    empty = [s[0] for s in segments if s[2] == s[1]]
    is_dw = o.case.product == "dW"

    def room() -> Tensor:
        return torch.empty_like(o.out) if is_dw else o.out.new_empty(o.case.rows, o.out.size(-1))

    kept = None if fresh else room()
    if kept is not None and is_dw:
        kept.zero_()  # an expert without rows keeps its zeros

    def run() -> Tensor:
        result = room() if kept is None else kept
        if is_dw:
            x, dy = o.sorted_x(), o.sorted_dy()
            for expert, begin, end in filled:
                torch.mm(dy[begin:end].t(), x[begin:end], out=result[expert])
            for expert in empty if fresh else ():
                result[expert].zero_()
            return result
        rows, w = o.sorted_rows(), o.weights_as_factor()
        for expert, begin, end in filled:
            torch.mm(rows[begin:end], w[expert], out=result[begin:end])
        return o.delivered(result)

    return Contender(run, lambda y: relative_error(o, y), roundings=roundings_with_copies(o))


def ours(o: Operands, kernel: KernelNumbers | None = None, *, fresh: bool = False) -> Contender:
    """moegemm with the kernel its planner chooses, or with a given one. `fresh`: each call allocates its result."""
    r, topk = o.routing, o.case.model.topk
    flags: dict[str, Any] = {"permute_x" if o.case.first else "permute_y": True, "out": None if fresh else o.out}
    if kernel is not None:
        # Which axes rows, columns and depth lie along: include/moegemm/plan.h.
        axes = {"forward": "MNK", "dX": "MKN", "dW": "NKM"}[o.case.product]
        flags |= {f"BLOCK_SIZE_{axis}": extent for axis, extent in zip(axes, kernel[:3], strict=True)}
        flags["num_stages"] = kernel[3]
    if o.router_weights is not None:
        flags["fuse_mul_post"] = True
    X, dY, W = o.X, o.dY, o.W

    def run() -> Tensor:
        if o.case.product == "forward":
            return moegemm.grouped_gemm_forward(X, W, topk, r.m_sizes, r.gather_indices, o.router_weights, **flags)
        if o.case.product == "dX":
            return moegemm.grouped_gemm_dX(dY, W, r.gather_indices, r.m_sizes, topk, **flags)
        return moegemm.grouped_gemm_dW(X, dY, r.m_sizes, r.gather_indices, topk, **flags)

    return Contender(run, lambda y: relative_error(o, y), poisons=None if fresh else o.out)


def check(contender: Contender) -> dict[str, Any]:
    """Runs a contender once and compares samples with the fp32 reference."""
    if contender.poisons is not None:
        contender.poisons.fill_(float("nan"))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        result = contender.run()
    if any("nearest kernel" in str(w.message) for w in raised):
        raise KernelReplacedError
    error = contender.error(result)
    # One rounding of every element bounds the norm of the error by eps / 2; fp32 sums add almost nothing.
    limit = contender.roundings * torch.finfo(result.dtype).eps / 2
    checked: dict[str, Any] = {"error": error, "error_limit": limit, "correct": error <= limit}
    if not math.isfinite(error) or (contender.poisons is not None and has_nan(result)):
        checked |= {"error": None, "correct": False, "fault": "elements are NaN or were not written"}
    return checked


class KernelList:
    """The compiled kernels that can be asked for one by one."""

    def __init__(self, device: str) -> None:
        described = moegemm.info()
        gpus = described["gpus"]
        backend = gpus[0]["backend"] if device == "cuda" and gpus else "cpu"
        backend = os.environ.get("MOEGEMM_BACKEND", backend)
        self._kernels = [k for k in described["kernels"] if k["backend"] == backend]
        self._replaced: set[tuple[str, KernelNumbers]] = set()

    def of(self, case: Case) -> dict[str, KernelNumbers]:
        """By tile and stages: kernels that differ in dtype or operand path only share a name here, because the
        problem decides between them."""
        named: dict[str, KernelNumbers] = {}
        for kernel in self._kernels:
            rows, columns, depth = kernel["tile"]
            numbers = (rows, columns, depth, kernel["stages"])
            if kernel["op"] == case.product and min(numbers) > 0 and (case.op, numbers) not in self._replaced:
                named[f"ours {rows}x{columns}x{depth} s{kernel['stages']}"] = numbers
        return named

    def forget(self, case: Case, name: str) -> None:
        """The library says only once per process that it replaced a kernel, so that is remembered."""
        self._replaced.add((case.op, self.of(case)[name]))
