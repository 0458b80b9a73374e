"""What autograd has to know of a tensor that an operator writes; torch's own operators tell it themselves."""

import torch
from torch import Tensor


def require_no_grad(out: Tensor) -> None:
    """As torch.mm(out=) does: what is written to `out` has no gradient."""
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "out requires grad; a tensor that does not is accepted (or torch.no_grad()): what is written to out= has "
            "no gradient"
        )


def count_write(tensor: Tensor) -> None:
    """Lets autograd notice that a tensor which it saved has other values now. Compiled graphs count by themselves."""
    if not (torch.compiler.is_compiling() or tensor.is_inference()):
        torch.autograd.graph.increment_version(tensor)
