"""The ways to ask torch for a second derivative."""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

FORWARD_MODE = ["func.hessian", "dual backward"]
WAYS = ["backward", "func.grad of grad", *FORWARD_MODE]


def second_derivative(way: str, loss: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor) -> None:
    if way == "backward":
        t = t.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(t), t, create_graph=True)
        gradient.square().sum().backward()
    elif way == "func.hessian":
        torch.func.hessian(loss)(t)
    elif way == "func.grad of grad":
        torch.func.grad(lambda t: torch.func.grad(loss)(t).square().sum())(t)
    else:
        t = t.detach().requires_grad_()
        with forward_ad.dual_level():
            loss(forward_ad.make_dual(t, torch.ones_like(t))).backward()
