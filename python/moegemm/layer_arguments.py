"""What an expert layer is called with: checked, cast for autocast, and flattened to rows."""

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from moegemm.activations import Activation, activation_named
from moegemm.operators.errors import explain, no_tensor
from moegemm.operators.loading import ops
from moegemm.operators.raw import autocast_dtype
from moegemm.sharded import local_weight


class LayerOptions(TypedDict, total=False):
    """The keyword arguments of `moe_mlp` that describe the experts; see there."""

    layout: str
    transposed: bool
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    alpha: float | None
    limit: float | None
    up_offset: float | None


class LayerTensors(NamedTuple):
    """The tensors of one call, under the names of `moe_mlp`."""

    x: Tensor  # [T, H]
    w_gate_up: Tensor
    w_down: Tensor
    expert_ids: Tensor  # [T, topk]
    router_weights: Tensor | None  # [T, topk]; fp32 or x's dtype
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


_OPTIONAL = ("router_weights", "gate_up_bias", "down_bias")
_check_layer: Callable[..., None] = ops.check_layer.default


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _require_leading_dimensions(x: Tensor, expert_ids: Tensor, router_weights: Tensor | None) -> None:
    """Those that are about to be flattened."""
    if x.dim() < 1:
        raise ValueError("x has no dimensions; its shape must be [..., H]")
    if expert_ids.dim() < 1 or expert_ids.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"expert_ids is {list(expert_ids.shape)}; its shape must be [..., topk] with the leading dimensions of x, "
            f"{list(x.shape[:-1])}"
        )
    if router_weights is not None and router_weights.shape != expert_ids.shape:
        raise ValueError(
            f"router_weights is {list(router_weights.shape)}; its shape must be that of expert_ids, "
            f"{list(expert_ids.shape)}"
        )


def layer_arguments(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    activation: str | Activation,
    options: LayerOptions,
) -> tuple[Activation, LayerTensors]:
    """Raises TypeError or ValueError with the name of the first argument that does not fit the others."""
    gate_up_bias, down_bias = options.get("gate_up_bias"), options.get("down_bias")
    w_gate_up, w_down = local_weight("w_gate_up", w_gate_up), local_weight("w_down", w_down)
    gate_up_bias, down_bias = local_weight("gate_up_bias", gate_up_bias), local_weight("down_bias", down_bias)
    given = LayerTensors(x, w_gate_up, w_down, expert_ids, router_weights, gate_up_bias, down_bias)
    for name, value in zip(LayerTensors._fields, given, strict=True):
        if not isinstance(value, Tensor) and not (value is None and name in _OPTIONAL):
            raise no_tensor(name, value)
    chosen = activation_named(
        activation,
        options.get("layout", "concatenated"),
        options.get("alpha"),
        options.get("limit"),
        options.get("up_offset"),
    )
    _require_leading_dimensions(x, expert_ids, router_weights)
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, w_gate_up, w_down = x.to(dtype), w_gate_up.to(dtype), w_down.to(dtype)
        gate_up_bias, down_bias = _cast(gate_up_bias, dtype), _cast(down_bias, dtype)
    if router_weights is not None:
        if router_weights.dtype not in (torch.float32, x.dtype):
            router_weights = router_weights.float()
        router_weights = router_weights.flatten(0, -2) if router_weights.dim() > 1 else router_weights.unsqueeze(0)
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    ids = expert_ids.flatten(0, -2) if expert_ids.dim() > 1 else expert_ids.unsqueeze(0)
    tensors = LayerTensors(rows, w_gate_up, w_down, ids, router_weights, gate_up_bias, down_bias)
    try:
        _check_layer(*tensors, chosen.text(), options.get("transposed", False))
    except RuntimeError as error:
        raise explain(error, tensors._asdict()) from None
    return chosen, tensors
