"""Which dispatcher a call of the layer uses: the one it is given, or that of the ranks which its mesh or weights name.

Those of one group have exchanges of counts alike, so that a rank which cannot go on, or wants another one than the
others, is heard by them whichever they are in.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moegemm.distributed.agreement import agree_on
from moegemm.distributed.all_to_all import AllToAll, process_group
from moegemm.operators.errors import no_tensor, shown
from moegemm.quantized.weight import QuantizedWeight, mesh_of, weight_of

_made: dict[str, list[AllToAll]] = {}  # by the name of the group, each of whose ranks has made the same ones


def _made_for(group: dist.ProcessGroup) -> list[AllToAll]:
    made = _made.setdefault(group.group_name, [])
    if made and made[0].group is not group:  # that one was destroyed
        made.clear()
    return made


def _with_experts(group: dist.ProcessGroup, num_experts: int, x: object) -> AllToAll:
    """One for each number of experts."""
    for dispatcher in _made_for(group):
        if dispatcher.num_experts == num_experts:
            return dispatcher
    made: AllToAll = _make(group, num_experts, x)
    return made


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="ranks make the dispatcher of a group together: call the layer once before you compile it into one graph"
)
def _make(group: dist.ProcessGroup, num_experts: int, x: object) -> AllToAll:
    """A collective of its own, at the first call; those after it may be traced."""
    made = _made_for(group)
    if made:
        made[-1].agree({"num_experts": num_experts}, x)
    made.append(AllToAll(group, num_experts))
    for dispatcher in made:
        dispatcher.width = max(each.experts_here for each in made)
    return made[-1]


def _experts_of(w_down: Any) -> int:
    if not isinstance(w_down, Tensor | QuantizedWeight):
        raise no_tensor("w_down", w_down)
    mine = weight_of("w_down", w_down)
    if mine.dim() != 3:
        raise ValueError(f"w_down is {list(mine.shape)}; three dimensions are accepted, the first that of the experts")
    return int(mine.size(0))


def chosen_dispatcher(mesh: Any, dispatcher: Any, weights: Iterable[Any], w_down: Any, x: object) -> Any:
    """`weights`: w_down and others, the first of which that says where its experts are stands in for a mesh."""
    if dispatcher is not None:
        if not (hasattr(dispatcher, "dispatch") and hasattr(dispatcher, "combine")):
            raise TypeError(f"dispatcher is {shown(dispatcher)}; it must have dispatch and combine")
        return dispatcher
    if mesh is None:
        mesh = next((found for found in map(mesh_of, weights) if found is not None), None)
    if mesh is None:
        raise ValueError(
            "mesh and dispatcher are None and w_down is no DTensor whose experts are sharded; one of them must say "
            "which ranks hold the experts"
        )
    group = process_group(mesh)
    try:
        experts_here = _experts_of(w_down)
    except Exception as error:
        made = _made_for(group)
        if not made:
            agree_on(group, {}, error)
        made[-1].refuse(error, x)
        raise
    return _with_experts(group, experts_here * group.size(), x)
