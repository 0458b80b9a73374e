"""What an expert layer is called with: checked, cast for autocast, and flattened to rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from moegemm.activations import Activation, activation_named
from moegemm.expert_layer.weights import AnyWeight
from moegemm.operators.errors import explain
from moegemm.operators.loading import ops
from moegemm.operators.packed import Packed
from moegemm.operators.raw import autocast_dtype, cast_for_autocast
from moegemm.operators.rules import require_bool, require_halves, require_tensor, require_weight_of_each_slot
from moegemm.quantized.checking import checked_weight
from moegemm.quantized.weight import QuantizedWeight
from moegemm.sharded import local_weight

Given = Tensor | QuantizedWeight | Packed  # a weight as callers hand it over; the last is for our own
Pair = tuple[Given, Given]


class LayerOptions(TypedDict, total=False):
    """The keyword arguments of `moe_mlp` that describe the experts; see there."""

    layout: str
    transposed: bool
    gate_up_bias: Tensor | Pair | None
    down_bias: Tensor | None
    alpha: float | None
    limit: float | None
    up_offset: float | None


LAYER_OPTIONS = tuple(LayerOptions.__annotations__)


def require_known(function: str, options: Mapping[str, object], accepted: Sequence[str]) -> None:
    """Refuses what a function that takes options by name would ignore."""
    for name in options:
        if name not in accepted:
            known = ", ".join(accepted)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; accepted are {known}")


class TokenTensors(NamedTuple):
    """The tensors of one call, under the names of `moe_mlp`."""

    x: Tensor  # [T, H]
    w_gate_up: AnyWeight
    w_down: AnyWeight
    expert_ids: Tensor  # [T, topk]
    router_weights: Tensor | None  # [T, topk]; fp32 or x's dtype
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


class ExpertTensors(NamedTuple):
    """The tensors of a layer's experts, whatever its rows are."""

    w_gate_up: AnyWeight
    w_up: AnyWeight | None  # where w_gate_up has the gates alone
    w_down: AnyWeight
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def named(self) -> dict[str, Any]:
        """By the caller's names, for messages."""
        return {"w_gate_up[1]" if name == "w_up" else name: value for name, value in self._asdict().items()}


_check_layer: Callable[..., None] = ops.check_layer.default


def _cast(tensor: AnyWeight | None, dtype: torch.dtype) -> AnyWeight | None:
    return tensor if tensor is None or isinstance(tensor, Packed) else cast_for_autocast(tensor, dtype)


def plain_shapes(weights: Sequence[AnyWeight | None], like: Tensor) -> tuple[Tensor | None, ...]:
    """Weights for the rules, which read shapes, dtypes and devices: quantised ones by their stand-ins."""
    return tuple(w.stand_in(like) if isinstance(w, Packed) else w for w in weights)


def _weight(name: str, value: object) -> AnyWeight:
    """One weight as the products take it."""
    if not isinstance(value, QuantizedWeight | Packed):
        require_tensor(name, value)
    return checked_weight(name, value)  # type: ignore[no-any-return]


def _split(name: str, value: object) -> tuple[Any, Any]:
    """A tensor of gates and ups, or one of each."""
    if not isinstance(value, (tuple, list)):
        return _weight(name, value), None
    if len(value) != 2:
        raise ValueError(f"{name} has {len(value)} tensors; one tensor or a pair (gate, up) is accepted")
    return _weight(f"{name}[0]", value[0]), _weight(f"{name}[1]", value[1])


def _one_bias(value: object, activation: str) -> Tensor | None:
    """The first product's bias; a pair is put side by side, [E, 2 I]."""
    if value is None:
        return None
    parts: tuple[Tensor, Tensor | None] = _split("gate_up_bias", value)
    gate, up = parts
    if up is None:
        return gate
    require_halves("gate_up_bias[1]", activation)
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        raise ValueError(
            f"gate_up_bias is a pair of {list(gate.shape)} {gate.dtype} on {gate.device} and {list(up.shape)} "
            f"{up.dtype} on {up.device}; both must be [E, I], of one dtype and on one device"
        )
    return torch.cat((gate, up), 1)


def _require_layout_of(transposed: object, weights: dict[str, AnyWeight | None]) -> None:
    require_bool("transposed", transposed)
    for name, w in weights.items():
        if transposed and isinstance(w, Packed):
            raise ValueError(f"transposed is True with {name} in {w.word}; quantised weights are [E, N, K] only")


def row_weights_like(name: str, weights: Tensor, rows: Tensor) -> Tensor:
    """The weights of rows or slots in a dtype that the operators read."""
    if not weights.dtype.is_floating_point:
        raise TypeError(
            f"{name} has dtype {weights.dtype}; a floating dtype is accepted: torch.float32 and that of the rows, "
            f"{rows.dtype}, are read as they are, others are cast to torch.float32"
        )
    return weights if weights.dtype in (torch.float32, rows.dtype) else weights.float()


def expert_arguments(
    w_gate_up: Given | Pair, w_down: Given, activation: str | Activation, options: LayerOptions, device: torch.device
) -> tuple[Activation, ExpertTensors]:
    """The experts' part of a layer's arguments, cast as autocast asks."""
    gate, up = _split("w_gate_up", w_gate_up)
    down = _weight("w_down", w_down)
    require_tensor("down_bias", options.get("down_bias"), optional=True)
    _require_layout_of(options.get("transposed", False), {"w_gate_up": gate, "w_gate_up[1]": up, "w_down": down})
    layout = options.get("layout", "concatenated")
    chosen = activation_named(activation, layout, options.get("alpha"), options.get("limit"), options.get("up_offset"))
    first_bias = _one_bias(options.get("gate_up_bias"), chosen.text())
    tensors = ExpertTensors(gate, up, down, first_bias, local_weight("down_bias", options.get("down_bias")))
    dtype = autocast_dtype(device)
    if dtype is None:
        return chosen, tensors
    return chosen, ExpertTensors(*(_cast(tensor, dtype) for tensor in tensors))  # type: ignore[arg-type]


def _require_leading_dimensions(x: Tensor, expert_ids: Tensor, router_weights: Tensor | None) -> None:
    """Those that are about to be flattened."""
    if x.dim() < 1:
        raise ValueError("x has no dimensions; its shape must be [..., H]")
    if expert_ids.dim() < 1 or expert_ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"expert_ids is {list(expert_ids.shape)}; its shape must be [..., topk] with the leading dimensions of x, "
            f"{list(x.shape[:-1])}"
        )
    require_weight_of_each_slot(router_weights, expert_ids)


def token_arguments(
    x: Tensor,
    w_gate_up: Given | Pair,
    w_down: Given,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    activation: str | Activation,
    options: LayerOptions,
) -> tuple[Activation, TokenTensors, AnyWeight | None]:
    """The checked arguments of a layer of tokens, and the ups where w_gate_up is a pair. Raises TypeError or ValueError
    with the name of the first argument that does not fit the others."""
    require_tensor("x", x)
    chosen, experts = expert_arguments(w_gate_up, w_down, activation, options, x.device)
    require_tensor("expert_ids", expert_ids)
    require_tensor("router_weights", router_weights, optional=True)
    _require_leading_dimensions(x, expert_ids, router_weights)
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x = cast_for_autocast(x, dtype)
    if router_weights is not None:
        router_weights = row_weights_like("router_weights", router_weights, x)
        router_weights = router_weights.flatten(0, -2) if router_weights.dim() > 1 else router_weights.unsqueeze(0)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    ids = expert_ids.flatten(0, -2) if expert_ids.dim() > 1 else expert_ids.unsqueeze(0)
    first, w_up, second, gate_up_bias, down_bias = experts
    tensors = TokenTensors(rows, first, second, ids, router_weights, gate_up_bias, down_bias)
    gates, up, down = plain_shapes(experts[:3], rows)
    try:
        _check_layer(rows, gates, down, *tensors[3:], chosen.text(), options.get("transposed", False), up)
    except RuntimeError as error:
        raise explain(error, tensors._asdict()) from None
    return chosen, tensors, w_up
