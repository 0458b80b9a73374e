"""The expert layer with low-rank adapters beside its products."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from moegemm.activations import Activation
from moegemm.capacity import capacity_of
from moegemm.expert_layer.arguments import (
    LAYER_OPTIONS,
    Given,
    LayerOptions,
    TokenTensors,
    require_known,
    token_arguments,
)
from moegemm.expert_layer.function import LayerCall, LayerTensors
from moegemm.expert_layer.layer import compact_tails, route_rows
from moegemm.expert_layer.weights import stored_weights
from moegemm.lora.adapter import LoraAdapter
from moegemm.lora.function import run_lora_layer
from moegemm.lora.low_rank import LowRank, require_fitting
from moegemm.lora.products import adapted_first, adapted_second
from moegemm.operators.errors import explain, no_tensor, shown
from moegemm.operators.gradients.derivatives import differentiated_once, refuse_forward_mode, vmap_refusal
from moegemm.operators.loading import ops
from moegemm.operators.raw import torch_allows_tf32
from moegemm.operators.shortcuts import apply_function
from moegemm.routing import combine

_ACTIVATION = "lora_moe_mlp's activation"  # in messages


class _Activate(torch.autograd.Function):
    """The activation on its own, for layers that need the rows on either side of it."""

    @staticmethod
    def forward(pre: Tensor, bias: Tensor | None, m_sizes: Tensor, activation: Activation) -> Tensor:
        result: Tensor = ops.activate.default(pre, bias, m_sizes, activation.text())
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, activation = inputs
        ctx.save_for_backward(*tensors)
        ctx.activation = activation

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return *differentiated_once(_ACTIVATION, _activation_gradients, ctx, gradients[0]), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal(_ACTIVATION)


def _activation_gradients(ctx: Any, d_act: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
    """Those of the rows and of the bias."""
    pre, bias, m_sizes = saved
    order = torch.arange(pre.size(0), device=pre.device, dtype=torch.int32)
    d_pre, _ = ops.activate_backward.default(
        d_act, pre, bias, m_sizes, order, None, 1, None, None, ctx.activation.text(), False, False
    )
    return d_pre, ops.expert_sums.default(d_pre, m_sizes, None, None, 1) if ctx.needs_input_grad[1] else None


Adapters = LoraAdapter | LowRank | Sequence[LoraAdapter | LowRank] | None
_KEYWORDS = ("gate_up", "down", "activation", "max_rows", "num_tokens", "overflow", "allow_tf32", *LAYER_OPTIONS)


def _listed(name: str, adapters: Any) -> list[LowRank]:
    alone = adapters is None or isinstance(adapters, LoraAdapter | LowRank)
    given = [] if adapters is None else list(adapters) if not alone and isinstance(adapters, Iterable) else [adapters]
    for adapter in given:
        if not isinstance(adapter, LoraAdapter | LowRank):
            raise TypeError(
                f"{name} is {shown(adapter)} of type {type(adapter).__name__}; a LoraAdapter, a LowRank, a sequence of "
                "them or None is accepted"
            )
    return [adapter.low_rank() if isinstance(adapter, LoraAdapter) else adapter for adapter in given]


def checked_adapters(
    gate_up: Adapters, down: Adapters, tensors: TokenTensors, transposed: bool
) -> tuple[list[LowRank], list[LowRank]]:
    """Those of the first product and those of the second, which fit the layer's weights."""
    experts, hidden = tensors.w_gate_up.size(0), tensors.x.size(1)
    inner, columns = tensors.w_down.size(1 if transposed else 2), tensors.w_gate_up.size(2 if transposed else 1)
    first, second = _listed("gate_up", gate_up), _listed("down", down)
    for low in first:
        require_fitting("gate_up", low, tensors.x, experts, hidden, columns)
    for low in second:
        require_fitting("down", low, tensors.x, experts, inner, hidden)
    return first, second


def lora_moe_mlp(
    x: Tensor,
    w_gate_up: Given,
    w_down: Given,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    gate_up: Adapters = None,
    down: Adapters = None,
    activation: str | Activation = "swiglu",
    *,
    max_rows: int | None = None,
    num_tokens: Tensor | None = None,
    overflow: Tensor | None = None,
    allow_tf32: bool | None = None,
    **options: Unpack[LayerOptions],
) -> Tensor:
    """moe_mlp with low-rank adapters beside one or both products. Differentiable in x, A, B and router_weights.

    W and its adapter are never added: the product contracts [X | X A^T] with [W | scaling * B] in fp32 and rounds once.
    X A^T and scaling * B are rounded to x's dtype before. Several adapters of one product, of any ranks, count
    together. Frozen weights (requires_grad False, or QuantizedWeights) get no gradient and cost no dW. Shapes and
    options as in moe_mlp; A [E, r, K] and B [E, N, r] also where W is transposed. A and B have x's dtype or fp32; the
    products read them in x's dtype, and their gradients have their own.
    Dropout acts on the adapters' inputs while the adapter is in training mode (see LoraAdapter). max_rows, num_tokens,
    overflow and allow_tf32 are those of moe_mlp; with an adapter that drops, rows are no capacity.

    >>> import torch, moegemm
    >>> x, w1, w2 = torch.randn(6, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    >>> weights, ids = torch.randn(6, 4).softmax(-1).topk(2)
    >>> adapter = moegemm.LoraAdapter(4, 16, 48, rank=4)
    >>> same = moegemm.lora_moe_mlp(x, w1, w2, ids, weights, adapter)
    >>> torch.allclose(same, moegemm.moe_mlp(x, w1, w2, ids, weights), atol=1e-5)
    True
    """
    require_known("lora_moe_mlp", options, _KEYWORDS)
    if isinstance(w_gate_up, (tuple, list)):
        raise no_tensor("w_gate_up", w_gate_up)
    chosen, tensors, _ = token_arguments(x, w_gate_up, w_down, expert_ids, router_weights, activation, options)
    tokens, first_w, second_w, ids, router_weights, gate_up_bias, down_bias = tensors
    transposed = options.get("transposed", False)
    experts, topk = first_w.size(0), ids.size(1)
    first, second = checked_adapters(gate_up, down, tensors, transposed)
    refuse_forward_mode("lora_moe_mlp", *tensors, *(t for low in (*first, *second) for t in (low.A, low.B)))
    tf32 = torch_allows_tf32(tokens) if allow_tf32 is None else allow_tf32
    capacity = capacity_of(ids, max_rows, num_tokens, overflow)
    dropping = any(low.dropout > 0.0 for low in (*first, *second))
    if dropping and capacity is not None:
        raise NotImplementedError(
            f"max_rows is {max_rows}, num_tokens {shown(num_tokens)} and overflow {shown(overflow)} with an adapter "
            "that drops; only None is accepted then"
        )
    words = compact_tails(capacity, first_w, second_w)
    routed = route_rows(ids, experts, capacity, words)
    try:
        if not dropping:
            stored = stored_weights((first_w, None, second_w), (first_w, second_w), transposed, tf32, False, words)
            layer = LayerTensors(tokens, *stored[:3], router_weights, gate_up_bias, down_bias)
            call = LayerCall("lora_moe_mlp", chosen, *stored[3:])
            return run_lora_layer(call, routed, layer, first, second).view(x.shape)
        pre = adapted_first(tokens, first_w, first, routed, transposed, tf32)
        act: Tensor = apply_function(_Activate, pre, gate_up_bias, routed.m_sizes, chosen)
        rows = adapted_second(act, second_w, second, routed, transposed, tf32, down_bias)
    except RuntimeError as error:
        raise explain(error, tensors._asdict()) from None
    return combine(rows, router_weights, topk).view(x.shape)
