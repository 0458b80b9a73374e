"""The expert layer of a group of ranks: tokens to the ranks of their experts, the layer there, and back."""

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from moegemm.activations import Activation
from moegemm.distributed.all_to_all import AllToAll
from moegemm.distributed.choosing import chosen_dispatcher
from moegemm.distributed.dispatcher import Dispatched, Dispatcher
from moegemm.distributed.gradient_scale import scaled_gradient
from moegemm.expert_layer.arguments import (
    LAYER_OPTIONS,
    Given,
    LayerOptions,
    Pair,
    TokenTensors,
    require_known,
    token_arguments,
)
from moegemm.expert_layer.function import LayerCall, LayerTensors, require_later, run_layer
from moegemm.expert_layer.layer import moe_mlp
from moegemm.expert_layer.weights import AnyWeight, Routed, stored_weights
from moegemm.lora.function import run_lora_layer
from moegemm.lora.layer import Adapters, checked_adapters, lora_moe_mlp
from moegemm.lora.low_rank import LowRank
from moegemm.operators.errors import explain
from moegemm.operators.gradients.derivatives import refuse_forward_mode
from moegemm.operators.gradients.weight_gradients import WeightGradients, require_queue
from moegemm.operators.raw import torch_allows_tf32
from moegemm.operators.rules import require_number
from moegemm.sharded import is_distributed


class _Training(TypedDict, total=False):
    """Keyword arguments of `moe_mlp` that LayerOptions does not have."""

    accumulate: bool
    allow_tf32: bool | None
    weight_gradients: WeightGradients | None


class ExpertParallelOptions(LayerOptions, _Training, total=False):
    """The keyword arguments of `moe_mlp` that describe the experts of a rank; see there."""


_KEYWORDS = ("mesh", "dispatcher", "gate_up", "down", "gradient_scale", *ExpertParallelOptions.__annotations__)


class _Given(NamedTuple):
    """The checked arguments of a call."""

    chosen: Activation
    tensors: TokenTensors
    w_up: AnyWeight | None  # where w_gate_up is a pair
    options: ExpertParallelOptions
    parameters: tuple[Given | Pair, Given]  # the weights as they were given
    first: list[LowRank]  # adapters of the first product
    second: list[LowRank]

    @property
    def adapted(self) -> bool:
        return bool(self.first or self.second)

    @property
    def trains(self) -> bool:
        """Whether anything of the experts has a gradient."""
        _, gate_up, down, _, _, *biases = self.tensors
        factors = [factor for low in (*self.first, *self.second) for factor in (low.A, low.B)]
        return any(t is not None and t.requires_grad for t in (gate_up, self.w_up, down, *biases, *factors))

    @property
    def drops(self) -> bool:
        return any(low.dropout > 0.0 for low in (*self.first, *self.second))


def _exact_layer(given: _Given) -> tuple[LayerCall, LayerTensors]:
    """What computes a row for every slot: made, with all that it refuses, before the rows come. Until then it has the
    tokens and the weights of their slots."""
    x, gate_up, down, _, router_weights, *biases = given.tensors
    options = given.options
    tf32 = torch_allows_tf32(x) if options.get("allow_tf32") is None else bool(options["allow_tf32"])
    stored = stored_weights(
        (gate_up, given.w_up, down), given.parameters, options.get("transposed", False), tf32,
        options.get("accumulate", False),
    )  # fmt: skip
    tensors = LayerTensors(x, *stored[:3], router_weights, *biases)
    later = options.get("weight_gradients")
    call = LayerCall("expert_parallel_mlp", given.chosen, *stored[3:], later, weighted=False)
    require_later(call, tensors)
    return call, tensors


def _exactly(dispatcher: AllToAll, given: _Given, layer: tuple[LayerCall, LayerTensors]) -> Tensor:
    """Sums and gradients have the bits of one process with all tokens: its router weights are multiplied where that
    process would, on the way home and in the experts' backward."""
    x, _, _, ids, router_weights, *_ = given.tensors
    call, tensors = layer
    records = torch.is_grad_enabled() and (
        given.trains or any(t is not None and t.requires_grad for t in (x, router_weights))
    )
    sent = dispatcher.send(x, ids, router_weights, weights_travel=records, experts_train=given.trains)
    routed = Routed(sent.state.m_sizes, sent.state.gather_indices, 1)
    tensors = tensors._replace(x=sent.rows, weights=sent.row_weights)
    if given.adapted:
        rows = run_lora_layer(call, routed, tensors, given.first, given.second)
    else:
        rows = run_layer(call, routed, tensors)
    return dispatcher.combine_weighted_rows(rows, sent, router_weights)


def _without_garbage(sent: Dispatched) -> Tensor:
    """The ids of rows from num_tokens on name no expert."""
    if sent.num_tokens is None:
        return sent.expert_ids
    order = torch.arange(sent.expert_ids.size(0), device=sent.expert_ids.device)
    return sent.expert_ids.masked_fill((order >= sent.num_tokens).unsqueeze(1), -1)


def _by_parts(dispatcher: Dispatcher, given: _Given) -> Tensor:
    """Dispatch, the layer of one GPU, combine: for any dispatcher."""
    x, gate_up, down, ids, router_weights, first_bias, second_bias = given.tensors
    if isinstance(dispatcher, AllToAll):
        travel = dispatcher.unique
        sent = dispatcher.send(x, ids, router_weights, weights_travel=travel, experts_train=given.trains)
    else:
        sent = dispatcher.dispatch(x, ids, router_weights)
    sent_ids, capacity = sent.expert_ids, (sent.max_rows, sent.num_tokens, sent.overflow)
    if given.drops:  # their layer knows no capacity
        sent_ids, capacity = _without_garbage(sent), (None, None, None)
    options: Any = {
        "activation": given.chosen, "transposed": given.options.get("transposed", False), "gate_up_bias": first_bias,
        "down_bias": second_bias, "allow_tf32": given.options.get("allow_tf32"),
        **dict(zip(("max_rows", "num_tokens", "overflow"), capacity, strict=True)),
    }  # fmt: skip
    if given.adapted:
        adapters = given.first, given.second
        rows = lora_moe_mlp(sent.rows, gate_up, down, sent_ids, sent.row_weights, *adapters, **options)
    else:
        first = gate_up if given.w_up is None else (gate_up, given.w_up)
        rows = moe_mlp(sent.rows, first, down, sent_ids, sent.row_weights, **options)
    return dispatcher.combine(rows, sent)


def expert_parallel_mlp(
    x: Tensor,
    w_gate_up: Given | Pair,
    w_down: Given,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    activation: str | Activation = "swiglu",
    *,
    mesh: Any = None,
    dispatcher: Dispatcher | None = None,
    gate_up: Adapters = None,
    down: Adapters = None,
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

    Arguments that one rank refuses, and calls that do not fit each other, raise on every rank; not so on a rank that
    names no group (mesh and dispatcher are both missing and no weight is a DTensor, or what it gives is none of them),
    nor with a dispatcher that has no `refuse`.
    """
    stacks = w_gate_up if isinstance(w_gate_up, tuple | list) else (w_gate_up,)
    dispatcher_used = chosen_dispatcher(mesh, dispatcher, (w_down, *stacks), w_down, x)
    try:
        if mesh is not None and dispatcher is not None:
            raise ValueError("mesh and dispatcher are both given; give one of them")
        given = _checked(x, w_gate_up, w_down, expert_ids, router_weights, activation, options, dispatcher_used)
        given = _with_adapters(given, gate_up, down, gradient_scale)
        exact = isinstance(dispatcher_used, AllToAll) and not dispatcher_used.unique and not given.drops
        layer = _exact_layer(given) if exact else None
    except Exception as error:
        if hasattr(dispatcher_used, "refuse"):  # the others are waiting
            dispatcher_used.refuse(error, x)
        raise
    try:
        out = _by_parts(dispatcher_used, given) if layer is None else _exactly(dispatcher_used, given, layer)
    except RuntimeError as error:
        raise explain(error, given.tensors._asdict()) from None
    return out.view(x.shape)


def _scaled(given: _Given, factor: float) -> _Given:
    """With gradients of the experts that are multiplied."""
    tensors = given.tensors
    names = ("w_gate_up", "w_down", "gate_up_bias", "down_bias")
    changed = {name: scaled_gradient(getattr(tensors, name), factor) for name in names}
    first, second = (
        [low._replace(A=scaled_gradient(low.A, factor), B=scaled_gradient(low.B, factor)) for low in lows]
        for lows in (given.first, given.second)
    )
    scaled = given._replace(tensors=tensors._replace(**changed), w_up=scaled_gradient(given.w_up, factor))
    return scaled._replace(first=first, second=second)


def _with_adapters(given: _Given, gate_up: Adapters, down: Adapters, gradient_scale: float | None) -> _Given:
    options = given.options
    first, second = checked_adapters(gate_up, down, given.tensors, options.get("transposed", False))
    added = bool(options.get("accumulate") or options.get("weight_gradients"))
    if (first or second) and (given.w_up is not None or added):
        raise ValueError(
            "adapters are given; with them w_gate_up is one tensor, without accumulate or weight_gradients"
        )
    given = given._replace(first=first, second=second)
    if gradient_scale is None:
        return given
    require_number("gradient_scale", gradient_scale)
    if added:
        raise ValueError("gradient_scale is given; what goes to main_grad or is computed later is not scaled")
    return _scaled(given, gradient_scale)


def _checked(
    x: Tensor, w_gate_up: Given | Pair, w_down: Given, expert_ids: Tensor, router_weights: Tensor | None,
    activation: str | Activation, options: ExpertParallelOptions, dispatcher: Any,
) -> _Given:  # fmt: skip
    """Everything that can be refused is refused before the first collective."""
    if is_distributed(x):
        raise TypeError("x is a DTensor; the tokens of this rank are accepted: give x.to_local()")
    require_known("expert_parallel_mlp", options, _KEYWORDS)
    described: Any = {name: value for name, value in options.items() if name in LAYER_OPTIONS}
    chosen, tensors, w_up = token_arguments(x, w_gate_up, w_down, expert_ids, router_weights, activation, described)
    refuse_forward_mode("expert_parallel_mlp", *tensors)
    require_queue(options.get("weight_gradients"))
    here = getattr(dispatcher, "experts_here", tensors.w_down.size(0))
    if tensors.w_down.size(0) != here:
        raise ValueError(f"w_down has {tensors.w_down.size(0)} experts; {dispatcher} has {here} on each of its ranks")
    exact = isinstance(dispatcher, AllToAll) and not dispatcher.unique
    for name in ("accumulate", "weight_gradients"):
        if options.get(name) and not exact:
            raise ValueError(f"{name} is given; it needs an AllToAll dispatcher with unique=False")
    return _Given(chosen, tensors, w_up, options, (w_gate_up, w_down), [], [])
