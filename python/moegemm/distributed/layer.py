"""The expert layer of a group of ranks: tokens to the ranks of their experts, the layer there, and back."""

from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from moegemm.activations import Activation
from moegemm.distributed.all_to_all import AllToAll, process_group
from moegemm.distributed.dispatcher import Dispatcher
from moegemm.distributed.gradient_scale import scaled_gradient
from moegemm.layer import Routed, layer_call, moe_mlp, run_layer
from moegemm.layer_arguments import LayerOptions, LayerTensors, layer_arguments
from moegemm.lora import LoraAdapter, lora_moe_mlp
from moegemm.operators.derivatives import refuse_forward_mode
from moegemm.operators.errors import explain, shown
from moegemm.sharded import is_distributed, local_weight, mesh_of_experts

_dispatchers: dict[tuple[str, int], AllToAll] = {}


class _Training(TypedDict, total=False):
    """Keyword arguments of `moe_mlp` that lora_moe_mlp does not have."""

    accumulate: bool
    allow_tf32: bool | None


class ExpertParallelOptions(LayerOptions, _Training, total=False):
    """The keyword arguments of `moe_mlp` that describe the experts of a rank; see there."""


def dispatcher_for(mesh: Any, experts_here: int) -> AllToAll:
    """One for each group and number of experts: making it is a collective of its own."""
    group = process_group(mesh)
    key = group.group_name, experts_here * group.size()
    found = _dispatchers.get(key)
    if found is None or found.group is not group:
        found = _dispatchers[key] = AllToAll(group, key[1])
    return found


def _chosen_dispatcher(mesh: Any, dispatcher: Any, w_gate_up: Any) -> Any:
    if mesh is not None and dispatcher is not None:
        raise ValueError("mesh and dispatcher are both given; give one of them")
    if dispatcher is not None:
        if not (hasattr(dispatcher, "dispatch") and hasattr(dispatcher, "combine")):
            raise TypeError(f"dispatcher is {shown(dispatcher)}; it must have dispatch and combine")
        return dispatcher
    if not isinstance(w_gate_up, Tensor):
        raise TypeError(f"w_gate_up is {shown(w_gate_up)}; a torch.Tensor is accepted")
    if mesh is None:
        mesh = mesh_of_experts(w_gate_up)
    if mesh is None:
        raise ValueError(
            "mesh and dispatcher are None and w_gate_up is no DTensor whose experts are sharded; one of them must say "
            "which ranks hold the experts"
        )
    return dispatcher_for(mesh, local_weight("w_gate_up", w_gate_up).size(0))


def _exactly(
    dispatcher: AllToAll, chosen: Activation, tensors: LayerTensors, options: ExpertParallelOptions,
    parameters: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """A row for every slot. Sums and gradients have the bits of one process with all tokens: its router weights are
    multiplied where that process would, on the way home and in the experts' backward."""
    experts = (tensors.w_gate_up, tensors.w_down, tensors.gate_up_bias, tensors.down_bias)
    trains = any(t is not None and t.requires_grad for t in experts)
    needs_weights = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    sent = dispatcher.send(
        tensors.x, tensors.expert_ids, tensors.router_weights, weights_travel=needs_weights, experts_train=trains
    )
    m_sizes, gather_indices = sent.state.m_sizes, sent.state.gather_indices
    received = tensors._replace(x=sent.rows, expert_ids=sent.expert_ids, router_weights=sent.row_weights)
    call, received = layer_call(
        chosen, received, options.get("transposed", False), options.get("allow_tf32"), parameters
    )
    rows = run_layer(call._replace(weighted=False), Routed(m_sizes, gather_indices, 1), received)
    return dispatcher.combine_weighted_rows(rows, sent, tensors.router_weights)


def _by_parts(
    dispatcher: Dispatcher, chosen: Activation, tensors: LayerTensors, options: ExpertParallelOptions,
    adapters: tuple[LoraAdapter | None, LoraAdapter | None],
) -> Tensor:  # fmt: skip
    """Dispatch, the layer of one GPU, combine: for any dispatcher."""
    sent = dispatcher.dispatch(tensors.x, tensors.expert_ids, tensors.router_weights)
    if adapters != (None, None):
        layer_options: Any = {k: v for k, v in options.items() if k in LayerOptions.__annotations__}
        rows = lora_moe_mlp(
            sent.rows, tensors.w_gate_up, tensors.w_down, sent.expert_ids, sent.row_weights, *adapters, chosen,
            **{**layer_options, "gate_up_bias": tensors.gate_up_bias, "down_bias": tensors.down_bias},
        )  # fmt: skip
        return dispatcher.combine(rows, sent)
    rows = moe_mlp(
        sent.rows, tensors.w_gate_up, tensors.w_down, sent.expert_ids, sent.row_weights, chosen,
        transposed=options.get("transposed", False), gate_up_bias=tensors.gate_up_bias, down_bias=tensors.down_bias,
        allow_tf32=options.get("allow_tf32"), max_rows=sent.max_rows, num_tokens=sent.num_tokens,
        overflow=sent.overflow,
    )  # fmt: skip
    return dispatcher.combine(rows, sent)


def expert_parallel_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    activation: str | Activation = "swiglu",
    *,
    mesh: Any = None,
    dispatcher: Dispatcher | None = None,
    gate_up: LoraAdapter | None = None,
    down: LoraAdapter | None = None,
    gradient_scale: float | None = None,
    **options: Unpack[ExpertParallelOptions],
) -> Tensor:
    """moe_mlp with the experts spread over ranks. Every rank calls it with its own tokens and its own experts.

    Shapes and options as in moe_mlp, with E the experts of this rank: w_gate_up [E, C, H], w_down [E, H, I], or
    DTensors of all experts that are sharded on their first dimension. expert_ids count the experts of all ranks, rank
    after rank. A rank may have no tokens; it must call nevertheless, as in any collective, and run its backward.

    mesh: the ranks, a DeviceMesh with one dimension or a ProcessGroup; taken from DTensor weights if not given.
    dispatcher: what moves the rows, AllToAll(mesh, experts) if not given. With that one the output and all gradients
    have the bits of moe_mlp in one process on the tokens of all ranks, one rank after the other. Gradients of the
    experts are sums over the tokens of all ranks.

    gate_up, down: adapters of this rank's experts, as in lora_moe_mlp.
    gradient_scale multiplies the gradients of weights, biases and adapters: 1 / ranks where every rank's loss is a mean
    over its own tokens, and other parameters' gradients are averaged over the ranks.

    Arguments that one rank refuses, and calls that do not fit each other, raise on every rank.
    """
    chosen_dispatcher = _chosen_dispatcher(mesh, dispatcher, w_gate_up)
    try:
        chosen, tensors = _checked(
            x, w_gate_up, w_down, expert_ids, router_weights, activation, options, chosen_dispatcher
        )
    except Exception as error:
        if hasattr(chosen_dispatcher, "refuse"):  # the others are waiting
            chosen_dispatcher.refuse(error, x)
        raise
    parameters = (w_gate_up, w_down) if options.get("accumulate") else None
    if gradient_scale is not None:
        tensors = tensors._replace(
            w_gate_up=scaled_gradient(tensors.w_gate_up, gradient_scale),
            w_down=scaled_gradient(tensors.w_down, gradient_scale),
            gate_up_bias=scaled_gradient(tensors.gate_up_bias, gradient_scale),
            down_bias=scaled_gradient(tensors.down_bias, gradient_scale),
        )
    adapters = gate_up, down
    try:
        if isinstance(chosen_dispatcher, AllToAll) and not chosen_dispatcher.unique and adapters == (None, None):
            out = _exactly(chosen_dispatcher, chosen, tensors, options, parameters)
        else:
            out = _by_parts(chosen_dispatcher, chosen, tensors, options, adapters)
    except RuntimeError as error:
        raise explain(error, tensors._asdict()) from None
    return out.view(x.shape)


def _checked(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, expert_ids: Tensor, router_weights: Tensor | None,
    activation: str | Activation, options: ExpertParallelOptions, dispatcher: Any,
) -> tuple[Activation, LayerTensors]:  # fmt: skip
    """Everything that can be refused is refused before the first collective."""
    if is_distributed(x):
        raise TypeError("x is a DTensor; the tokens of this rank are accepted: give x.to_local()")
    layer_options: Any = {k: v for k, v in options.items() if k in LayerOptions.__annotations__}
    chosen, tensors = layer_arguments(x, w_gate_up, w_down, expert_ids, router_weights, activation, layer_options)
    refuse_forward_mode("expert_parallel_mlp", *tensors)
    here = getattr(dispatcher, "experts_here", tensors.w_gate_up.size(0))
    if tensors.w_gate_up.size(0) != here:
        raise ValueError(
            f"w_gate_up has {tensors.w_gate_up.size(0)} experts; {dispatcher} has {here} on each of its ranks"
        )
    if options.get("accumulate") and not (isinstance(dispatcher, AllToAll) and not dispatcher.unique):
        raise ValueError("accumulate=True needs an AllToAll dispatcher with unique=False")
    return chosen, tensors
