"""Weights that are DTensors: every call takes this rank's part of them, and gives autograd the whole one's gradient."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

PLAIN_TENSORS = (Tensor, Parameter)  # their types: a subclass may have a dispatch of its own


def is_distributed(value: object) -> bool:
    """Whether it is a DTensor. By name: importing them takes half a second, and whoever has one has imported them."""
    return type(value) not in PLAIN_TENSORS and any(kind.__name__ == "DTensor" for kind in type(value).__mro__)


def _gradient_placement(name: str, weight: Any, dimension: int) -> Any:
    """Where the gradient of this rank's part belongs, along one dimension of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    placement, ranks = weight.placements[dimension], weight.device_mesh.size(dimension)
    if ranks == 1 or (type(placement) is Shard and placement.dim == 0):
        return placement
    if isinstance(placement, Replicate):
        return Partial()  # every rank has seen other tokens
    raise ValueError(
        f"{name} is a DTensor with placements {tuple(weight.placements)}; accepted are Shard(0), which gives each rank "
        f"some experts, and Replicate() along each dimension of its mesh (dimension {dimension} is neither)"
    )


def local_weight(name: str, weight: Any) -> Any:
    """The weight on this rank; what is no DTensor stays as it is."""
    if not is_distributed(weight):
        return weight
    placements = [_gradient_placement(name, weight, dimension) for dimension in range(weight.device_mesh.ndim)]
    return weight.to_local(grad_placements=placements)


def mesh_of_experts(weight: Any) -> Any:
    """The mesh, with one dimension, over which a DTensor's experts are spread; None for anything else."""
    if not is_distributed(weight):
        return None
    mesh = weight.device_mesh
    spread = [i for i, placement in enumerate(weight.placements) if placement.is_shard(0)]
    if len(spread) != 1:
        return None
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[spread[0]]]
