"""Running one operator from the arguments of a raw (not differentiable) function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moegemm.operators import row_products
from moegemm.operators.errors import explain
from moegemm.operators.gradients.derivatives import refuse_forward_mode
from moegemm.operators.gradients.main_grad import count_write, require_no_grad
from moegemm.operators.loading import ops
from moegemm.operators.options import (
    ALLOW_TF32,
    AUTOTUNE,
    CHECK,
    FLOAT32_OUTPUT,
    MULTIPLY,
    PERMUTE_X,
    PERMUTE_Y,
    WARN_AT_ONCE,
)
from moegemm.operators.packed import Packed
from moegemm.operators.rules import require_tensor
from moegemm.operators.segments import ZERO, tail_options
from moegemm.operators.shortcuts import cuda_matmul_uses_tf32
from moegemm.tuning import KernelConfig
from moegemm.tuning.autotune import after_chosen_kernel, autotune_word

# Of each product the raw function, the operator that makes its result, and the one that writes to `out`.
_OPERATORS: dict[str, tuple[str, Callable[..., Tensor], Callable[..., None]]] = {
    "forward": ("grouped_gemm_forward", row_products.forward, row_products.forward_out),
    "dx": ("grouped_gemm_dX", row_products.dx, row_products.dx_out),
    "dw": ("grouped_gemm_dW", ops.dw.default, ops.dw_out.default),
}


class RawArguments(NamedTuple):
    """The operators' tensors, in their order; `names` is what the caller knows the first two as."""

    first: Tensor
    second: Tensor | Packed
    m_sizes: Tensor
    gather_indices: Tensor | None
    router_weights: Tensor | None
    topk: int
    names: tuple[str, str] = ("X", "W")

    def tensors(self) -> dict[str, object]:
        """By the caller's names, for messages."""
        routing = {"m_sizes": self.m_sizes, "gather_indices": self.gather_indices, "topk_weights": self.router_weights}
        return {self.names[0]: self.first, self.names[1]: self.second, **routing}


def torch_allows_tf32(lead: Tensor) -> bool:
    """cuda_matmul_uses_tf32 if `lead` is of such a product."""
    return lead.is_cuda and lead.dtype == torch.float32 and cuda_matmul_uses_tf32()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that torch.mm would cast to on that device, None for none. Autocast knows no meta tensors."""
    if device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast_for_autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does to an operand of torch.mm: floating tensors but float64 take its dtype."""
    kept = not tensor.is_floating_point() or tensor.dtype == torch.float64
    return tensor if kept else tensor.to(dtype)


def raw_options(
    lead: Tensor,
    permute_x: bool,
    permute_y: bool,
    fuse_mul_post: bool,
    check: bool,
    allow_tf32: bool | None,
    autotune: bool = False,
    tails: str = ZERO,
    expected_rows: int | None = None,
) -> str:
    """The operators' `options`."""
    if allow_tf32 is None:
        allow_tf32 = isinstance(lead, Tensor) and torch_allows_tf32(lead)
    return (
        (PERMUTE_X if permute_x else "")
        + (PERMUTE_Y if permute_y else "")
        + (MULTIPLY if fuse_mul_post else "")
        + (CHECK if check else "")
        + (ALLOW_TF32 if allow_tf32 else "")
        + (autotune_word() if autotune else "")
        + tail_options(tails, expected_rows)
    )


def _any_requires_grad(*tensors: object) -> bool:
    """Asked before names are gathered for a message, which takes 1 us that a decode step notices."""
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def run_raw(
    name: str,
    arguments: RawArguments,
    options: str,
    config: KernelConfig,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Runs operator `name`; the result is `out` or a new tensor of `out_dtype`."""
    numbers = config.numbers(type(config).__name__, options)
    if numbers is not None and torch.compiler.is_compiling():
        options += WARN_AT_ONCE
    function, functional, into_out = _OPERATORS[name]
    try:
        refuse_forward_mode(function, arguments.first, arguments.second, arguments.router_weights)
        if out is not None:
            require_tensor("out", out)
            if out_dtype not in (None, out.dtype):
                raise TypeError(f"out_dtype is {out_dtype}, but out has dtype {out.dtype}; give one of them")
            if torch.is_grad_enabled() and _any_requires_grad(out, *arguments[:5]):
                require_no_grad({"out": out, **arguments.tensors()})
            into_out(*arguments[:6], options, numbers, out)
            count_write(out)
            result = out
        else:
            if out_dtype == torch.float32:
                options += FLOAT32_OUTPUT
            elif out_dtype not in (None, arguments.first.dtype):
                raise TypeError(
                    f"out_dtype is {out_dtype}; accepted are torch.float32 and {arguments.first.dtype}, as the inputs"
                )
            result = functional(*arguments[:6], options, numbers)
    except (RuntimeError, AttributeError) as error:
        raise explain(error, arguments.tensors(), arguments.topk) from None
    if (numbers is not None or AUTOTUNE in options) and not torch.compiler.is_compiling():
        after_chosen_kernel(stacklevel=3)
    return result
