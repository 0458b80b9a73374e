"""What an expert layer is called with: checked, cast for autocast, and flattened to rows."""

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from moegemm.activations import Activation, activation_named
from moegemm.operators.errors import no_tensor
from moegemm.operators.raw import autocast_dtype
from moegemm.operators.rules import require_same_device, require_same_dtype


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


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; its shape must be {meaning} = {list(shape)}")


def _require_tensors(tensors: dict[str, Tensor | None], optional: set[str]) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and not (value is None and name in optional):
            raise no_tensor(name, value)


def _require_extents(x: Tensor, w_down: Tensor, expert_ids: Tensor, inner: int) -> None:
    """The sizes that no product can do without."""
    topk, hidden, experts = expert_ids.size(-1), x.size(-1), w_down.size(0)
    if topk >= 1 and hidden >= 1 and experts >= 1 and inner >= 1:
        return
    for letter, size, name, tensor in (
        ("H", hidden, "x", x),
        ("E", experts, "w_down", w_down),
        ("I", inner, "w_down", w_down),
        ("topk, its last dimension,", topk, "expert_ids", expert_ids),
    ):
        if size < 1:
            raise ValueError(f"{name} is {list(tensor.shape)}; {letter} must be at least 1")


def _of_one_kind(t: LayerTensors) -> bool:
    device, dtype = t.x.device, t.x.dtype
    return (
        dtype in (torch.bfloat16, torch.float32, torch.float16)
        and t.w_gate_up.dtype is dtype
        and t.w_down.dtype is dtype
        and t.w_gate_up.device == device
        and t.w_down.device == device
        and t.expert_ids.device == device
        and (t.router_weights is None or t.router_weights.device == device)
        and (t.gate_up_bias is None or (t.gate_up_bias.device == device and t.gate_up_bias.dtype is dtype))
        and (t.down_bias is None or (t.down_bias.device == device and t.down_bias.dtype is dtype))
    )


def _require_one_kind(tensors: LayerTensors) -> None:
    """Every tensor where x is, weights and biases in its dtype. Which one is not is asked only if one is not."""
    if _of_one_kind(tensors):
        return
    x = tensors.x
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"x has dtype {x.dtype}; accepted are bfloat16, float16 and float32")
    for name, tensor in tensors._asdict().items():
        require_same_device(name, tensor, "x", x)
        if tensor is not None and name not in ("expert_ids", "router_weights"):
            require_same_dtype(name, tensor, "x", x)


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


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
    transposed = options.get("transposed", False)
    given = {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "expert_ids": expert_ids, "router_weights": router_weights,
        "gate_up_bias": gate_up_bias, "down_bias": down_bias,
    }  # fmt: skip
    _require_tensors(given, {"router_weights", "gate_up_bias", "down_bias"})
    chosen = activation_named(
        activation,
        options.get("layout", "concatenated"),
        options.get("alpha"),
        options.get("limit"),
        options.get("up_offset"),
    )
    if w_gate_up.dim() != 3 or w_down.dim() != 3:
        raise ValueError(
            f"w_gate_up is {list(w_gate_up.shape)} and w_down {list(w_down.shape)}; both must have three dimensions, "
            "the first of them E"
        )
    if x.dim() < 1:
        raise ValueError("x has no dimensions; its shape must be [..., H]")
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, w_gate_up, w_down = x.to(dtype), w_gate_up.to(dtype), w_down.to(dtype)
        gate_up_bias, down_bias = _cast(gate_up_bias, dtype), _cast(down_bias, dtype)
    hidden = x.size(-1)
    experts, inner = w_down.size(0), w_down.size(1 if transposed else 2)
    columns = 2 * inner if chosen.gated() else inner
    if expert_ids.dim() < 1:
        raise ValueError("expert_ids has no dimensions; its shape must be [..., topk]")
    _require_extents(x, w_down, expert_ids, inner)
    if transposed:
        require_shape("w_down", w_down, (experts, inner, hidden), "[E, I, H]")
        require_shape("w_gate_up", w_gate_up, (experts, hidden, columns), "[E, H, C]")
    else:
        require_shape("w_down", w_down, (experts, hidden, inner), "[E, H, I]")
        require_shape("w_gate_up", w_gate_up, (experts, columns, hidden), "[E, C, H]")
    if gate_up_bias is not None:
        require_shape("gate_up_bias", gate_up_bias, (experts, columns), "[E, C]")
    if down_bias is not None:
        require_shape("down_bias", down_bias, (experts, hidden), "[E, H]")
    topk = expert_ids.size(-1)
    ids_shape = (*x.shape[:-1], topk)
    require_shape("expert_ids", expert_ids, ids_shape, "[..., topk] with x's leading dimensions")
    if router_weights is not None:
        require_shape("router_weights", router_weights, ids_shape, "that of expert_ids")
        if router_weights.dtype not in (torch.float32, x.dtype):
            router_weights = router_weights.float()
        router_weights = router_weights.reshape(-1, topk)
    rows, ids = x.reshape(-1, hidden), expert_ids.reshape(-1, topk)
    tensors = LayerTensors(rows, w_gate_up, w_down, ids, router_weights, gate_up_bias, down_bias)
    _require_one_kind(tensors)
    return chosen, tensors
