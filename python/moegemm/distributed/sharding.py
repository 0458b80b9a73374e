"""Parameters of experts as DTensors of all experts, so that checkpoints, FSDP and optimizers see the whole ones."""

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Module, Parameter

from moegemm.lora import LoraAdapter
from moegemm.quantized.weight import QuantizedWeight

EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")


def _found(module: Module, names: Sequence[str]) -> Iterator[tuple[str, Module, str, Parameter]]:
    """Path, owner, name and parameter of each stack of experts, and of the bias that goes with it."""
    wanted = {*names, *(f"{name}_bias" for name in names)}
    for path, owner in module.named_modules():
        quantised = isinstance(owner, QuantizedWeight) and path.rpartition(".")[2] in wanted
        whole = quantised or isinstance(owner, LoraAdapter)
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if whole or (name in wanted and parameter.dim() >= 2):
                yield f"{path}.{name}" if path else name, owner, name, parameter


def _sharded(parameter: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's experts, in memory of their own: a view would keep those of all ranks."""
    mine = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    return DTensor.from_local(
        mine, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )  # fmt: skip


def shard_experts(module: Module, mesh: DeviceMesh, parameters: Sequence[str] = EXPERT_PARAMETERS) -> Module:
    """Leaves each rank its share of the experts: parameters become DTensors with Shard(0) of the whole ones.

    module: one that owns stacks of experts, or a model that has such modules somewhere. Names and layouts stay, so that
    state dicts have the same keys and shapes as before. Parameters and QuantizedWeights called `parameters`, those with
    `_bias` appended, and A and B of every LoraAdapter are sharded. mesh: one dimension, the ranks of
    `expert_parallel_mlp`. Every rank keeps its part of what it had: ranks that start from other values give no whole
    tensor that any of them had. Nothing is communicated; parameters on the meta device stay there.

    FSDP comes after it, with another dimension of the same mesh.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f"mesh is {mesh}; a DeviceMesh with one dimension is accepted, as mesh['ep']")
    found = list(_found(module, parameters))
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no parameter called {', '.join(parameters)} with experts in its first "
            "dimension"
        )
    for path, _, _, parameter in found:
        if isinstance(parameter, DTensor):
            raise ValueError(f"{path} is a DTensor already, with placements {parameter.placements}")
        if parameter.size(0) % mesh.size():
            raise ValueError(
                f"{path} is {list(parameter.shape)}; its {parameter.size(0)} experts must be a multiple of the "
                f"{mesh.size()} ranks of the mesh"
            )
    made: dict[Parameter, Parameter] = {}  # one parameter in several places stays one
    for _, owner, name, parameter in found:
        if parameter not in made:
            made[parameter] = Parameter(_sharded(parameter, mesh), requires_grad=parameter.requires_grad)
        owner.register_parameter(name, made[parameter])
    return module
