"""Low-rank adapters on experts: y_r = x_r W_e^T + scaling * (dropout(x_r) A_e^T) B_e^T, as grouped products."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from moegemm.activations import Activation
from moegemm.layer import Routed
from moegemm.layer_arguments import LayerOptions, layer_arguments
from moegemm.operators.derivatives import (
    once_only,
    refuse_forward_mode,
    refuse_tangents_in_backward,
    vmap_refusal,
)
from moegemm.operators.loading import ops
from moegemm.operators.raw import torch_allows_tf32
from moegemm.operators.rules import require_same_device, require_same_dtype
from moegemm.operators.shortcuts import apply_function
from moegemm.products import expert_product, first_product, second_product
from moegemm.routing import combine, route

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
        saved = ctx.saved_tensors
        refuse_tangents_in_backward(_ACTIVATION, gradients[0], *saved)
        pre, bias, m_sizes = saved
        d_bias = None
        with torch.no_grad():
            order = torch.arange(pre.size(0), device=pre.device, dtype=torch.int32)
            d_pre, _ = ops.activate_backward.default(
                gradients[0].contiguous(), pre, bias, m_sizes, order, None, 1, None, None, ctx.activation.text(),
                False, False,
            )  # fmt: skip
            if ctx.needs_input_grad[1]:
                d_bias = ops.expert_sums.default(d_pre, m_sizes, None, None, 1)
        return *once_only(_ACTIVATION, (d_pre, d_bias), (gradients[0], *saved)), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal(_ACTIVATION)


def _dropped(x: Tensor, p: float, training: bool) -> Tensor:
    return nn.functional.dropout(x, p, training) if p > 0 and training else x


def _require_adapter(name: str, a: Tensor, b: Tensor, x: Tensor, experts: int, k: int, n: int) -> None:
    rank = a.size(1) if a.dim() == 3 else -1
    if a.dim() != 3 or tuple(a.shape) != (experts, rank, k):
        raise ValueError(f"{name} has A {list(a.shape)}; its shape must be [E, r, K] = [{experts}, r, {k}]")
    if b.dim() != 3 or tuple(b.shape) != (experts, n, rank):
        raise ValueError(f"{name} has B {list(b.shape)}; its shape must be [E, N, r] = [{experts}, {n}, {rank}]")
    require_same_device(f"{name}.A", a, "x", x)
    require_same_device(f"{name}.B", b, "x", x)
    require_same_dtype(f"{name}.B", b, f"{name}.A", a)


class LoraAdapter(nn.Module):
    """A [E, r, K] and B [E, N, r] beside one stack of frozen experts W [E, N, K].

    B starts at zero, so that a new adapter changes nothing. `scaling` is alpha / r.

    >>> import torch, moegemm
    >>> adapter = moegemm.LoraAdapter(experts=4, in_features=16, out_features=32, rank=8, alpha=16)
    >>> adapter.A.shape, adapter.B.shape, adapter.scaling
    (torch.Size([4, 8, 16]), torch.Size([4, 32, 8]), 2.0)
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        rank: int,
        alpha: float = 16.0,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}; it must be at least 1")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout is {dropout}; it must be in [0, 1)")
        self.A = nn.Parameter(torch.empty(experts, rank, in_features, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(experts, out_features, rank, dtype=dtype, device=device))
        self.scaling, self.dropout = alpha / rank, dropout
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def extra_repr(self) -> str:
        experts, rank, k = self.A.shape
        return f"experts={experts}, in={k}, out={self.B.size(1)}, rank={rank}, scaling={self.scaling}"

    def merged(self, w: Tensor) -> Tensor:
        """W + scaling * B A, for serving without the adapter."""
        return w + self.scaling * torch.bmm(self.B, self.A).to(w.dtype)


def lora_moe_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    gate_up: LoraAdapter | None = None,
    down: LoraAdapter | None = None,
    activation: str | Activation = "swiglu",
    **options: Unpack[LayerOptions],
) -> Tensor:
    """moe_mlp with a low-rank adapter beside one or both products. Differentiable in x, A, B and router_weights.

    W and its adapter are never added: each adapter costs two products of rank r. Frozen weights (requires_grad False)
    get no gradient and cost no dW. Shapes and options as in moe_mlp; A [E, r, K] and B [E, N, r] also where W is
    transposed.
    Dropout acts on the adapters' inputs while the adapter is in training mode.

    >>> import torch, moegemm
    >>> x, w1, w2 = torch.randn(6, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    >>> weights, ids = torch.randn(6, 4).softmax(-1).topk(2)
    >>> adapter = moegemm.LoraAdapter(4, 16, 48, rank=4)
    >>> same = moegemm.lora_moe_mlp(x, w1, w2, ids, weights, adapter)
    >>> torch.allclose(same, moegemm.moe_mlp(x, w1, w2, ids, weights), atol=1e-5)
    True
    """
    chosen, tensors = layer_arguments(x, w_gate_up, w_down, expert_ids, router_weights, activation, options)
    tokens, w_gate_up, w_down, ids, router_weights, gate_up_bias, down_bias = tensors
    transposed = options.get("transposed", False)
    experts, hidden, topk = w_gate_up.size(0), tokens.size(1), ids.size(1)
    inner, columns = w_down.size(1 if transposed else 2), w_gate_up.size(2 if transposed else 1)
    if gate_up is not None:
        _require_adapter("gate_up", gate_up.A, gate_up.B, tokens, experts, hidden, columns)
    if down is not None:
        _require_adapter("down", down.A, down.B, tokens, experts, inner, hidden)
    trained = [t for adapter in (gate_up, down) if adapter is not None for t in (adapter.A, adapter.B)]
    refuse_forward_mode("lora_moe_mlp", *tensors, *trained)
    tf32 = torch_allows_tf32(tokens)
    m_sizes, gather_indices = route(ids, experts)
    routed = Routed(m_sizes, gather_indices, topk)

    pre = first_product(tokens, w_gate_up, routed, transposed, tf32)
    if gate_up is not None:
        low = first_product(_dropped(tokens, gate_up.dropout, gate_up.training).to(gate_up.A.dtype), gate_up.A, routed)
        pre = pre + gate_up.scaling * expert_product(low, gate_up.B, routed).to(pre.dtype)
    act: Tensor = apply_function(_Activate, pre, gate_up_bias, m_sizes, chosen)
    rows = second_product(act, w_down, routed, transposed, tf32, down_bias)
    if down is not None:
        low = expert_product(_dropped(act, down.dropout, down.training).to(down.A.dtype), down.A, routed)
        rows = rows + down.scaling * second_product(low, down.B, routed).to(rows.dtype)
    return combine(rows, router_weights, topk).view(x.shape)
