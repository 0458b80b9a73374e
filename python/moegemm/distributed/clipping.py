"""The norm of gradients that lie on different meshes: experts on one, everything else on another."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ for parameters of any meshes; every rank gets the norm of the whole model.

    Gradients without a mesh count once: they must be the same on every rank, as DDP makes them. Where ranks differ in
    which parameters have a gradient the collectives would not meet: all of a mesh must have one on each of its ranks.
    """
    of_meshes: dict[Any, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            of_meshes.setdefault(mesh, []).append(parameter)
    norms = []
    for of_mesh in of_meshes.values():
        norm = get_total_norm([p.grad for p in of_mesh if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    for of_mesh in of_meshes.values():
        clip_grads_with_norm_(of_mesh, max_norm, total)
    return total
