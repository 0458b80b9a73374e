"""Rules of arguments that no operator sees. All others are the library's (moegemm/describe.h); what tensors without
memory, which never reach it, can get wrong is refused here, in its words."""

import math
import os
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moegemm.operators.errors import no_tensor, shown


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is one, known or traced. Python takes True and False for some."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_tensor(name: str, value: object, optional: bool = False) -> None:
    if not isinstance(value, Tensor) and not (optional and value is None):
        raise no_tensor(name, value)


def reads_values(tensor: Tensor, asked: bool = False) -> bool:
    """Whether check mode looks at what is in it, which waits for its device: where the call or MOEGEMM_CHECK=1 asks for
    that. Traced code and tensors without memory are not checked."""
    if torch.compiler.is_compiling() or not (asked or os.environ.get("MOEGEMM_CHECK") == "1"):
        return False
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_surely(comparison: bool) -> bool:
    """Whether sizes compare so. Of what tracing knows by symbols only, only the data would say."""
    if not torch.compiler.is_compiling():
        return bool(comparison)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(comparison)


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)} of type {type(value).__name__}; True and False are accepted")


def require_int(name: str, value: object) -> None:
    if not is_integer(value):
        raise TypeError(f"{name} is {shown(value)} of type {type(value).__name__}; an int is accepted")


def require_integer(name: str, value: Any, least: int, most: int | None = None, meaning: str = "") -> None:
    require_int(name, value)
    if value < least and most is None:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; {least}{meaning} to {most} are accepted")


def require_number(name: str, value: object) -> None:
    """A finite one. What tracing knows by a symbol only stays unseen."""
    if not is_number(value):
        raise TypeError(f"{name} is {shown(value)} of type {type(value).__name__}; a number is accepted")
    if not torch.compiler.is_compiling() and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; a finite number is accepted")


def require_probability(name: str, value: object) -> None:
    if not is_number(value):
        raise TypeError(f"{name} is {shown(value)} of type {type(value).__name__}; a number is accepted")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value}; it must be in [0, 1)")


def require_dtype(name: str, tensor: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in accepted:
        names = ", ".join(map(str, accepted))
        rule = f"{names} is accepted" if len(accepted) == 1 else f"accepted are {names}"
        raise TypeError(f"{name} has dtype {tensor.dtype}; {rule}")


def require_same_dtype(name: str, tensor: Tensor, lead_name: str, lead: Tensor) -> None:
    if tensor.dtype != lead.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must have {lead.dtype}, the dtype of {lead_name}")


def require_same_device(name: str, tensor: Tensor | None, lead_name: str, lead: Tensor) -> None:
    if tensor is not None and tensor.device != lead.device:
        raise TypeError(f"{name} is on {tensor.device}; it must be on {lead.device}, where {lead_name} is")


def require_halves(name: str, activation: str) -> None:
    if "/concatenated" not in activation:
        raise ValueError(
            f"{name} is given with activation {activation}; gates and ups in two tensors are those of a gated "
            "activation, concatenated"
        )


def require_weight_of_each_slot(router_weights: Tensor | None, expert_ids: Tensor) -> None:
    if router_weights is not None and router_weights.shape != expert_ids.shape:
        raise ValueError(
            f"router_weights is {list(router_weights.shape)}; its shape must be that of expert_ids, "
            f"{list(expert_ids.shape)}"
        )


def require_valid_role(permute_x: bool, permute_y: bool, is_first_gemm: bool, dX_only: bool, dW_only: bool) -> None:
    """Which GEMM of the layer it is, and which gradients are wanted."""
    if permute_x and not is_first_gemm:
        raise ValueError("permute_x=True with is_first_gemm=False; only the first GEMM of a layer gathers X")
    if permute_y and is_first_gemm and not permute_x:
        raise ValueError("permute_y=True with is_first_gemm=True; only the second GEMM of a layer scatters Y")
    if dX_only and dW_only:
        raise ValueError("dX_only=True and dW_only=True; at most one of them is accepted")


def require_no_fuse_mul_pre(fuse_mul_pre: bool) -> None:
    if fuse_mul_pre:
        raise NotImplementedError("fuse_mul_pre=True; only False is accepted (fuse_mul_post multiplies after the GEMM)")
