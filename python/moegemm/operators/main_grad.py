"""Tensors that an operator writes: a fp32 `main_grad` of a parameter that its gradient is added to instead of becoming
its `grad`, and what autograd has to know of any of them, which torch's own operators tell it themselves."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moegemm.operators.errors import shown


def main_grad_of(W: Tensor, name: str = "W") -> Tensor:
    main_grad: object = getattr(W, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise ValueError(
            f"{name}.main_grad is {shown(main_grad)}; accumulate=True needs a fp32 tensor of {name}'s shape there"
        )
    if main_grad.dtype != torch.float32:
        raise TypeError(f"{name}.main_grad has dtype {main_grad.dtype}; accumulate=True needs torch.float32")
    if main_grad.shape != W.shape or main_grad.device != W.device:
        raise ValueError(
            f"{name}.main_grad is {list(main_grad.shape)} on {main_grad.device}; "
            f"it must be {list(W.shape)} on {W.device}"
        )
    return main_grad


def gradient_after_adding(parameter: Tensor, shape: torch.Size) -> Tensor | None:
    """What autograd gets once the gradient is in main_grad. Frameworks that wait for a gradient hook mark the parameter
    with `grad_added_to_main_grad`: the flag is set and a zero gradient (of one stored element) makes the hook run."""
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
