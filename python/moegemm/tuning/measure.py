"""Measuring the kernels of a product and its gradients ahead of time, and what has been measured."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from moegemm.operators.errors import explain
from moegemm.operators.loading import ops
from moegemm.operators.options import AUTOTUNE, MULTIPLY, without
from moegemm.operators.packed import Packed
from moegemm.operators.raw import RawArguments, raw_options
from moegemm.operators.row_products import forward
from moegemm.quantized.weight import QuantizedWeight, packed_of
from moegemm.tuning.autotune import after_chosen_kernel, installed_watch
from moegemm.tuning.reports import TuneReports


def tune(
    X: Tensor, W: Tensor | QuantizedWeight, m_sizes: Tensor, topk: int, gather_indices: Tensor | None = None,
    permute_x: bool = False, permute_y: bool = False, topk_weights: Tensor | None = None, fuse_mul_post: bool = False,
    *, backward: bool = True, budget: float = 2.0, again: bool = False, allow_tf32: bool | None = None,
    progress: Callable[[dict[str, Any]], object] | None = None,
) -> TuneReports:  # fmt: skip
    """Measures the kernels for a product and, with `backward`, for its two gradients, and remembers the fastest for
    calls with autotune=True. The arguments are those of grouped_gemm; no tensor and no random state is changed. dX is
    measured as backward runs it: without the multiply of fuse_mul_post, which then is a pass that also gives the
    gradient of topk_weights. Where X or W requires a gradient and topk_weights does not, dX multiplies itself. A
    quantised W has no dW.

    Returns one report per product; printed they are a table. Each has problem, kernel, steps (every launch of its
    plan), seconds, measured, why_not (why nothing was), not_saved (why it is kept in this process only), memory_bytes
    that the measurement borrowed, and candidates with their median microseconds and what became of them. `budget` is in
    seconds per product. What is known is measured only `again`. `progress` gets a dict before each launch and ends the
    measurement by returning False. Ctrl-C and what `progress` raises end it too; what was found is kept. Calls that
    `progress` makes measure nothing.

    >>> import torch, moegemm
    >>> X, W = torch.randn(6, 16), torch.randn(4, 8, 16)
    >>> reports = moegemm.tune(X, W, torch.tensor([3, 0, 1, 2]), topk=1, budget=0.1)
    >>> [report["problem"].split()[0] for report in reports]
    ['forward', 'dX', 'dW']
    """
    if not 0 < budget <= 3600:
        raise ValueError(f"budget is {budget}; seconds above 0 and up to 3600 are accepted")
    options = raw_options(X, permute_x, permute_y, fuse_mul_post, False, allow_tf32)
    if isinstance(X, Tensor) and (X.is_meta or is_fake(X)):
        raise ValueError("X is a meta or fake tensor; tune measures kernels, on tensors that have memory")
    watch = installed_watch()
    reports: list[dict[str, Any]] = []
    weight: Any = packed_of("W", W)
    quantised = isinstance(weight, Packed)
    arguments = RawArguments(X, weight, m_sizes, gather_indices, topk_weights, topk)

    def measure(op: str, first: Tensor, second: Any, multiply: bool = fuse_mul_post) -> bool:
        words = AUTOTUNE + (options if multiply else without(options, MULTIPLY))
        packed = {"w_scales": second.scales, "w_format": second.word} if isinstance(second, Packed) else {}
        found = ops.tune.default(
            op, first, second.values if packed else second, m_sizes, gather_indices, topk_weights, topk, words,
            float(budget), again, **packed,
        )  # fmt: skip
        reports.append(json.loads(found))
        return not reports[-1]["interrupted"]

    try:
        dx_multiplies = (
            fuse_mul_post
            and (X.requires_grad or weight.requires_grad)
            and not (topk_weights is not None and topk_weights.requires_grad)
        )
        with torch.no_grad(), watch.listening(progress):
            X, weight = X.detach(), weight if quantised else weight.detach()
            going_on = measure("forward", X, weight)
            if going_on and backward:
                # The product itself is what its gradient looks like: [M, N], and not zeros.
                dY = forward(X, weight, m_sizes, gather_indices, topk_weights, topk, options)
                if measure("dx", dY, weight, dx_multiplies) and not quantised:
                    measure("dw", dY, X)
    except RuntimeError as error:
        raise explain(error, arguments.tensors(), topk) from None
    after_chosen_kernel(stacklevel=2)
    return TuneReports(reports)


def tuning_cache() -> dict[str, Any]:
    """What has been measured: `path` of the file and `entries`, each with its device, problem and fastest kernel.

    >>> import moegemm
    >>> sorted(moegemm.tuning_cache())
    ['entries', 'path']
    """
    found: dict[str, Any] = json.loads(ops.tuning_cache())
    found["path"] = os.fsdecode(bytes(found["path"]))
    return found
