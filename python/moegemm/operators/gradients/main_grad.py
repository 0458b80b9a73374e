"""Tensors of the caller that operators write: `main_grad`, to which the gradient of a parameter is added instead of
becoming its `grad`, and `out=`. Autograd is told of these writes, as torch's own operators tell it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moegemm.operators.errors import shown
from moegemm.sharded import is_distributed

_ACCEPTED = (torch.float32, torch.bfloat16)


class MainGrad(NamedTuple):
    """Where dW goes instead of becoming a gradient."""

    parameter: Tensor
    name: str  # in messages
    found: Tensor | None  # the buffer; None: get_main_grad() says it in the backward
    transposed: bool = False  # the product stores [E, K, N] where the parameter is [E, N, K], or the reverse

    def buffer(self) -> Tensor:
        """With the memory layout of the product."""
        buffer = self.found
        if buffer is None:
            buffer = _checked(self.parameter, self.name, self.parameter.get_main_grad(), "get_main_grad()")  # type: ignore[attr-defined]
        return buffer.transpose(-1, -2) if self.transposed else buffer

    def overwritten(self) -> bool:
        """Whether dW is to replace what the buffer holds: Megatron-FSDP hands out buffers that nobody cleared."""
        return bool(getattr(self.parameter, "overwrite_main_grad", False))


def _checked(W: Tensor, name: str, main_grad: object, where: str) -> Tensor:
    if not isinstance(main_grad, Tensor):
        raise ValueError(
            f"{name}.{where} is {shown(main_grad)}; accumulate=True needs a fp32 or bf16 tensor of {name}'s shape there"
        )
    if main_grad.dtype not in _ACCEPTED:
        raise TypeError(
            f"{name}.{where} has dtype {main_grad.dtype}; accumulate=True needs torch.float32 or torch.bfloat16"
        )
    if main_grad.shape != W.shape or main_grad.device != W.device:
        raise ValueError(
            f"{name}.{where} is {list(main_grad.shape)} on {main_grad.device}; it must be {list(W.shape)} on {W.device}"
        )
    return main_grad


def main_grad_of(W: Tensor, name: str = "W") -> MainGrad:
    """What Megatron-Core and Megatron-FSDP hang on a parameter: `main_grad`, or `get_main_grad()` which makes one. The
    latter is asked in the backward, when the memory is there; torch.compile sees no such thing, and asks at once."""
    if is_distributed(W):
        raise TypeError(f"{name} is a DTensor; accumulate=True takes parameters that are plain tensors")
    get: object = getattr(W, "get_main_grad", None)
    if not callable(get):
        return MainGrad(W, name, _checked(W, name, getattr(W, "main_grad", None), "main_grad"))
    if torch.compiler.is_compiling():
        return MainGrad(W, name, _checked(W, name, get(), "get_main_grad()"))
    return MainGrad(W, name, None)


def gradient_after_adding(parameter: Tensor, shape: torch.Size) -> Tensor | None:
    """What autograd gets once the gradient is in main_grad. Frameworks that wait for a gradient hook mark the parameter
    with `grad_added_to_main_grad`: the flag is set and a zero gradient (of one stored element) makes the hook run. It
    is zero whether `zero_out_wgrad` asks for that or not."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return parameter.new_zeros(()).expand(shape)


def require_no_grad(tensors: Mapping[str, object]) -> None:
    """As torch.mm(out=) does: what is written to `out` has no gradient."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise RuntimeError(
                f"{name} requires grad; with out= tensors that do not are accepted (or torch.no_grad()): what is "
                "written to out= has no gradient"
            )


def count_write(tensor: Tensor) -> None:
    """Lets autograd notice that a tensor which it saved has other values now. Compiled graphs count by themselves."""
    if not (torch.compiler.is_compiling() or tensor.is_inference()):
        torch.autograd.graph.increment_version(tensor)
