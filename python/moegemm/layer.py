"""The expert layer in one call: route, first product, activation, second product, top-k sum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import Activation
from moegemm.capacity import Capacity, capacity_of, route_within
from moegemm.layer_arguments import LayerOptions, LayerTensors, layer_arguments
from moegemm.operators.derivatives import (
    once_only,
    refuse_forward_mode,
    refuse_tangents_in_backward,
    vmap_refusal,
)
from moegemm.operators.errors import explain
from moegemm.operators.loading import ops
from moegemm.operators.main_grad import count_write, gradient_after_adding, main_grad_of
from moegemm.operators.options import ACCUMULATE, ALLOW_TF32, DY_PER_TOKEN, PERMUTE_X, PERMUTE_Y, TRANSPOSED
from moegemm.operators.raw import torch_allows_tf32
from moegemm.operators.shortcuts import apply_function

_forward: Callable[..., Tensor] = ops.forward.default
_dx: Callable[..., Tensor] = ops.dx.default
_dw: Callable[..., Tensor] = ops.dw.default
_dw_out: Callable[..., None] = ops.dw_out.default
_route: Callable[..., tuple[Tensor, Tensor, Tensor]] = ops.route.default
_combine: Callable[..., Tensor] = ops.combine.default
_combine_rows: Callable[..., Tensor] = ops.combine_rows.default
_activate: Callable[..., Tensor] = ops.activate.default
_activate_backward: Callable[..., tuple[Tensor, Tensor]] = ops.activate_backward.default
_expert_sums: Callable[..., Tensor] = ops.expert_sums.default


class Routed(NamedTuple):
    """Which row belongs to which expert."""

    m_sizes: Tensor  # [E]
    gather_indices: Tensor  # [M]
    topk: int
    positions: Tensor | None = None  # [T, topk]: M is a capacity, and only slots with a position have a row


class MainGrad(NamedTuple):
    """Where dW is added in fp32 instead of becoming a gradient."""

    parameter: Tensor
    main_grad: Tensor  # with the memory layout of the parameter


class Weights(NamedTuple):
    """How one product's W is stored: [E, N, K], or [E, K, N] with transposed. Neither is ever copied."""

    options: str  # TRANSPOSED and ALLOW_TF32, each or not
    accumulated: MainGrad | None = None

    def _gradient(self, dy: Tensor, x: Tensor, routed: Routed, order: str) -> Tensor | None:
        if self.accumulated is None:
            return _dw(dy, x, *routed[:2], None, routed.topk, order + self.options)
        main_grad = self.accumulated.main_grad
        words = order + self.options + ACCUMULATE
        _dw_out(dy, x, *routed[:2], None, routed.topk, words, None, main_grad)
        count_write(main_grad)
        return gradient_after_adding(self.accumulated.parameter, main_grad.shape)

    def from_tokens(self, tokens: Tensor, w: Tensor, routed: Routed) -> Tensor:
        """[T, K] -> [M, N] in expert order: row r reads its token. The first product."""
        return _forward(tokens, w, *routed[:2], None, routed.topk, PERMUTE_X + self.options)

    def activated_from_tokens(
        self, tokens: Tensor, w: Tensor, bias: Tensor | None, activation: Activation, routed: Routed
    ) -> Tensor:
        """from_tokens with its bias and activation: nothing but activated rows is kept, with the same bits."""
        words = PERMUTE_X + self.options
        return _forward(tokens, w, *routed[:2], None, routed.topk, words, None, bias, activation.text())

    def to_flat(self, rows: Tensor, w: Tensor, routed: Routed, bias: Tensor | None = None) -> Tensor:
        """[M, K] in expert order -> [M, N] in flat order. The second product, which adds its bias before it rounds."""
        return _forward(rows, w, *routed[:2], None, routed.topk, PERMUTE_Y + self.options, None, bias)

    def to_tokens(
        self, rows: Tensor, w: Tensor, routed: Routed, bias: Tensor | None, router_weights: Tensor | None
    ) -> Tensor:
        """[M, K] in expert order -> [T, N]: the second product and the sum of each token's rows."""
        if routed.positions is None:
            return _combine(self.to_flat(rows, w, routed, bias), router_weights, routed.topk, False)
        in_order = _forward(rows, w, routed.m_sizes, None, None, 1, self.options, None, bias)
        return _combine_rows(in_order, router_weights, routed.positions, False)

    def from_tokens_backward(self, d_tokens: Tensor, w: Tensor, routed: Routed) -> Tensor:
        """The gradient of to_flat's rows where every slot of a token has the token's gradient [T, N]."""
        return _dx(d_tokens, w, *routed[:2], None, routed.topk, PERMUTE_Y + DY_PER_TOKEN + self.options)

    def to_tokens_backward(self, d_rows: Tensor, w: Tensor, routed: Routed) -> Tensor:
        """The gradient [T, K] of from_tokens' tokens."""
        if routed.positions is not None:
            in_order = _dx(d_rows, w, routed.m_sizes, None, None, 1, self.options)
            return _combine_rows(in_order, None, routed.positions, False)
        slots = _dx(d_rows, w, *routed[:2], None, routed.topk, PERMUTE_X + self.options)  # [M, K] in flat order
        return _combine(slots, None, routed.topk, False) if routed.topk > 1 else slots

    def gradient_of_first(self, d_rows: Tensor, tokens: Tensor, routed: Routed) -> Tensor | None:
        """dW of from_tokens."""
        return self._gradient(d_rows, tokens, routed, PERMUTE_X)

    def gradient_of_second(self, d_tokens: Tensor, rows: Tensor, routed: Routed) -> Tensor | None:
        """dW of to_flat, from the tokens' gradient [T, N] and rows that are scaled by their router weights."""
        return self._gradient(d_tokens, rows, routed, PERMUTE_Y + DY_PER_TOKEN)


class LayerCall(NamedTuple):
    """What a call asks for besides its tensors."""

    activation: Activation
    first: Weights
    second: Weights
    # False: topk is 1 and somebody else multiplies each row by its router weight. The output and its gradient are those
    # of rows without it; the weights are for the backward.
    weighted: bool = True


def _second_product(call: LayerCall, act: Tensor, routed: Routed, tensors: LayerTensors) -> Tensor:
    if not call.weighted:
        return call.second.to_flat(act, tensors.w_down, routed, tensors.down_bias)
    return call.second.to_tokens(act, tensors.w_down, routed, tensors.down_bias, tensors.router_weights)


def _route_rows(tensors: LayerTensors, capacity: Capacity | None) -> Routed:
    ids, experts = tensors.expert_ids, tensors.w_gate_up.size(0)
    if capacity is None:
        m_sizes, gather_indices, _ = _route(ids, experts, False, False)
        return Routed(m_sizes, gather_indices, ids.size(1))
    m_sizes, gather_indices, positions = route_within(capacity, ids, experts)
    return Routed(m_sizes, gather_indices, ids.size(1), positions)


def _run_forward(call: LayerCall, routed: Routed, tensors: LayerTensors) -> tuple[Tensor, Tensor]:
    """The layer's output, and the first product, which the backward needs."""
    pre = call.first.from_tokens(tensors.x, tensors.w_gate_up, routed)
    act = _activate(pre, tensors.gate_up_bias, routed.m_sizes, call.activation.text())
    return _second_product(call, act, routed, tensors), pre


def _run_inference(call: LayerCall, routed: Routed, tensors: LayerTensors) -> Tensor:
    """The same output where no backward needs the first product: the GPU may store activated rows only."""
    act = call.first.activated_from_tokens(tensors.x, tensors.w_gate_up, tensors.gate_up_bias, call.activation, routed)
    return _second_product(call, act, routed, tensors)


class MoeMlp(torch.autograd.Function):
    """The layer with its gradients; `moe_mlp` is the checked way in.

    Saved for the backward are x, the first product and the routing. With a the activation of row r, w its router
    weight and t its token: dw = <d_out[t] W_down, a>, and dW_down adds d_out[t]^T (w a). So the tokens' gradient is
    read where it is, one pass over the rows recomputes the activation and makes everything that depends on it, and
    nothing of size [M, H] is written but the rows that the top-k sum of dX reads. With a capacity M is that.
    """

    @staticmethod
    def forward(
        call: LayerCall, m_sizes: Tensor, gather_indices: Tensor, positions: Tensor | None, *arguments: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`arguments` are those of LayerTensors, one by one: autograd looks for tensors at the top only."""
        tensors = LayerTensors(*arguments)
        return _run_forward(call, Routed(m_sizes, gather_indices, tensors.expert_ids.size(1), positions), tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, m_sizes, gather_indices, positions, *arguments = inputs
        tensors = LayerTensors(*arguments)
        pre = output[1]
        ctx.mark_non_differentiable(pre)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # or `pre` would get a gradient of zeros; Dynamo makes none
        need_x, need_gate_up = ctx.needs_input_grad[4:6]
        ctx.save_for_backward(
            tensors.x if need_gate_up else None,
            tensors.w_gate_up if need_x else None,
            tensors.w_down,
            tensors.router_weights,
            tensors.gate_up_bias,
            tensors.down_bias,
            pre,
            m_sizes,
            gather_indices,
            positions if need_x else None,
        )
        ctx.compact = positions is not None
        ctx.call = call
        ctx.topk = tensors.expert_ids.size(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if gradients[0] is None:
            return (None,) * 11
        saved = ctx.saved_tensors
        refuse_tangents_in_backward("moe_mlp", gradients[0], *saved)
        try:
            with torch.no_grad():
                # Once: an expanded gradient would be copied by each product that reads it.
                found = _gradients(ctx, gradients[0].contiguous(), *saved)
        except RuntimeError as error:
            raise explain(error, {}) from None
        d_x, d_gate_up, d_down, *others = once_only("moe_mlp", found, (gradients[0], *saved))
        return None, None, None, None, d_x, d_gate_up, d_down, None, *others

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal("moe_mlp")


def _gradients(
    ctx: Any, d_out: Tensor, x: Tensor | None, w_gate_up: Tensor | None, w_down: Tensor, router_weights: Tensor | None,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, pre: Tensor, m_sizes: Tensor, gather_indices: Tensor,
    positions: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Those of x, w_gate_up, w_down, router_weights, gate_up_bias and down_bias, each if needed."""
    need_x, need_gate_up, need_down, _, need_weights, need_gate_up_bias, need_down_bias = ctx.needs_input_grad[4:]
    call, topk = ctx.call, ctx.topk
    routed = Routed(m_sizes, gather_indices, topk, positions)
    # Which indices are in range only the router weights say; without them a capacity's rows need none.
    indices = None if ctx.compact and router_weights is None else gather_indices
    d_x = d_gate_up = d_down = d_weights = d_gate_up_bias = d_down_bias = None
    if need_x or need_gate_up or need_down or need_weights or need_gate_up_bias:
        rows = call.second.from_tokens_backward(d_out, w_down, routed)  # [M, I]
        biased = need_weights and down_bias is not None
        d_pre, dots = _activate_backward(
            rows, pre, gate_up_bias, m_sizes, indices, router_weights, topk,
            d_out if biased else None, down_bias if biased else None,
            call.activation.text(), need_down, need_weights,
        )  # fmt: skip
        if need_weights:
            assert router_weights is not None
            d_weights = dots.view(router_weights.shape).to(router_weights.dtype)
        if need_down:  # `rows` now holds the weighted activation
            d_down = call.second.gradient_of_second(d_out, rows, routed)
        del rows
        if need_gate_up_bias:
            d_gate_up_bias = _expert_sums(d_pre, m_sizes, None, None, 1)
        if need_gate_up:
            d_gate_up = call.first.gradient_of_first(d_pre, x, routed)
        if need_x:
            d_x = call.first.to_tokens_backward(d_pre, w_gate_up, routed)
    if need_down_bias:
        d_down_bias = _expert_sums(d_out, m_sizes, gather_indices, router_weights, topk)
    return d_x, d_gate_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def _as_stored(w: Tensor, transposed: bool, allow_tf32: bool, accumulated: MainGrad | None) -> tuple[Tensor, Weights]:
    """The same W as its memory lies: a transposed view is the other layout, not a reason to copy."""
    if w.dim() == 3 and w.stride(-1) != 1 and w.stride(-2) == 1:
        w, transposed = w.transpose(-1, -2), not transposed
        if accumulated is not None:
            accumulated = MainGrad(accumulated.parameter, accumulated.main_grad.transpose(-1, -2))
    return w, Weights((TRANSPOSED if transposed else "") + (ALLOW_TF32 if allow_tf32 else ""), accumulated)


def layer_call(
    chosen: Activation, tensors: LayerTensors, transposed: bool, allow_tf32: bool | None,
    parameters: tuple[Tensor, Tensor] | None = None,
) -> tuple[LayerCall, LayerTensors]:  # fmt: skip
    """The call, and its tensors with weights as their memory lies. `parameters` get dW into their main_grad."""
    if allow_tf32 is None:
        allow_tf32 = torch_allows_tf32(tensors.x)
    to_gate_up = to_down = None
    if parameters is not None:
        to_gate_up = MainGrad(parameters[0], main_grad_of(parameters[0], "w_gate_up"))
        to_down = MainGrad(parameters[1], main_grad_of(parameters[1], "w_down"))
    stored_gate_up, first = _as_stored(tensors.w_gate_up, transposed, allow_tf32, to_gate_up)
    stored_down, second = _as_stored(tensors.w_down, transposed, allow_tf32, to_down)
    return LayerCall(chosen, first, second), tensors._replace(w_gate_up=stored_gate_up, w_down=stored_down)


def run_layer(call: LayerCall, routed: Routed, tensors: LayerTensors) -> Tensor:
    """The layer of rows that are routed, with gradients where they are wanted."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        m_sizes, gather_indices, _, positions = routed
        out: Tensor = apply_function(MoeMlp, call, m_sizes, gather_indices, positions, *tensors)[0]
        return out
    return _run_inference(call, routed, tensors)


def moe_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    activation: str | Activation = "swiglu",
    *,
    layout: str = "concatenated",
    transposed: bool = False,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    up_offset: float | None = None,
    accumulate: bool = False,
    allow_tf32: bool | None = None,
    max_rows: int | None = None,
    num_tokens: Tensor | None = None,
    overflow: Tensor | None = None,
) -> Tensor:
    """The expert layer: out[t] = sum over s of router_weights[t, s] * expert(expert_ids[t, s], x[t]). Differentiable.

    Shapes, with C = 2 I for a gated activation and C = I for one without:
        x: [..., H]; bf16, fp16 or fp32. expert_ids: [..., topk], int32 or int64; an id outside [0, E) adds nothing.
        router_weights: [..., topk], or None for a plain sum. Returns [..., H] in x's dtype.
        w_gate_up: [E, C, H], w_down: [E, H, I]; with transposed [E, H, C] and [E, I, H]. No layout is copied.
        gate_up_bias: [E, C], down_bias: [E, H]; None for none.

    activation: a name with a gate ("swiglu", "geglu", "clamped_swiglu" of gpt-oss, ...) or without ("silu", "relu2",
    ...); docs/how-to/layer.md has all of them. layout says how gate and up share the C columns: "concatenated" (all
    gates, then all ups) or "interleaved". alpha, limit and up_offset change the activation's numbers:
    gate * sigmoid(alpha * gate) * (up + up_offset), with gate clamped to at most limit and up to [-limit, limit].

    Gradients for x, both weights, both biases and router_weights, each computed only if needed. Kept for the backward
    are x, the first product and the routing. accumulate adds the weights' gradients to `w_gate_up.main_grad` and
    `w_down.main_grad`, fp32 tensors of their shapes, and leaves their grad alone. The same call gives the same bits. A
    CUDA graph can capture it.

    With max_rows, num_tokens or overflow the layer is compact: slots whose id is outside [0, E) take no row, nor do
    tokens from num_tokens on (one integer on the device; their output is zero). max_rows, T * topk unless given, is how
    many rows there is room for; what is computed and kept has that many rows. Rows that do not fit add nothing, those
    of the last experts first, and overflow, one int32 or int64 on the device, becomes 1; MOEGEMM_CHECK=1 raises with
    the first of them. Nothing synchronises, and the bits are those of the layer without a capacity.

    >>> import torch, moegemm
    >>> x, gate_up, down = torch.randn(6, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    >>> weights, ids = torch.randn(6, 4).softmax(-1).topk(2)
    >>> moegemm.moe_mlp(x, gate_up, down, ids, weights).shape
    torch.Size([6, 16])
    """
    options: LayerOptions = {
        "layout": layout, "transposed": transposed, "gate_up_bias": gate_up_bias, "down_bias": down_bias,
        "alpha": alpha, "limit": limit, "up_offset": up_offset,
    }  # fmt: skip
    chosen, tensors = layer_arguments(x, w_gate_up, w_down, expert_ids, router_weights, activation, options)
    parameters = (w_gate_up, w_down) if accumulate else None
    call, tensors = layer_call(chosen, tensors, transposed, allow_tf32, parameters)
    refuse_forward_mode("moe_mlp", *tensors)
    capacity = capacity_of(tensors.expert_ids, max_rows, num_tokens, overflow)
    try:
        out = run_layer(call, _route_rows(tensors, capacity), tensors)
    except RuntimeError as error:
        raise explain(error, tensors._asdict()) from None
    return out.view(x.shape)
