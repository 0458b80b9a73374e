"""One differentiable function for every expert layer: two products with an activation between them.

Rows are those of tokens (`moe_mlp`), or come and go in expert order (`experts_mlp`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import Activation
from moegemm.expert_layer.buffers import refuse_memory_of
from moegemm.expert_layer.weights import (
    AnyWeight,
    Routed,
    Weights,
    are_a_pair,
    gate_up_product,
    nothing_between,
    tokens_gradient_of_pair,
)
from moegemm.operators.gradients.derivatives import differentiated_once, vmap_refusal
from moegemm.operators.gradients.main_grad import count_write
from moegemm.operators.gradients.weight_gradients import WeightGradient, WeightGradients, apart
from moegemm.operators.loading import ops
from moegemm.operators.packed import REFUSED_GRADIENT, Packed, split
from moegemm.operators.shortcuts import apply_function

_activate: Callable[..., Tensor] = ops.activate.default
_activate_backward: Callable[..., tuple[Tensor, Tensor]] = ops.activate_backward.default
_expert_sums: Callable[..., Tensor] = ops.expert_sums.default
_add_weighted_bias: Callable[..., None] = ops.add_weighted_bias.default


class LayerCall(NamedTuple):
    """What a call asks for besides its tensors."""

    name: str  # of the function that was called, in messages
    activation: Activation
    first: Weights
    up: Weights | None  # of the ups, where gates and ups are two tensors
    second: Weights
    later: WeightGradients | None = None
    later_w: tuple[Tensor, Tensor | None, Tensor] | None = None  # w_gate_up, w_up and w_down of a call that has it
    out: Tensor | None = None  # the caller's memory for the output
    grad_out: Tensor | None = None  # and for the gradient of x
    # False: topk is 1 and somebody else multiplies each row by its weight. The output and its gradient are those of
    # rows without it; the weights are for the backward.
    weighted: bool = True


class LayerTensors(NamedTuple):
    """The tensors of a call that may have gradients. `weights` are those of slots, or of rows in expert order."""

    x: Tensor  # [T or R, H]
    w_gate_up: AnyWeight
    w_up: AnyWeight | None  # where w_gate_up has the gates alone
    w_down: AnyWeight
    weights: Tensor | None  # [T, topk] or [R]; fp32 or x's dtype
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


TENSORS = len(LayerTensors._fields)
BEFORE = 5  # arguments of the function before them


def joined(call: LayerCall, tensors: LayerTensors, scales: Sequence[Tensor | None]) -> LayerTensors:
    """With the weights as the products take them; `scales` are those of the quantised ones, or none at all."""
    if not scales:
        return tensors
    first, up, down = scales
    w_up = None if call.up is None or tensors.w_up is None else call.up.joined(tensors.w_up, up)
    w_gate_up = None if tensors.w_gate_up is None else call.first.joined(tensors.w_gate_up, first)
    return tensors._replace(w_gate_up=w_gate_up, w_up=w_up, w_down=call.second.joined(tensors.w_down, down))


def _row_weights(routed: Routed, weights: Tensor | None) -> Tensor | None:
    """Those that the activation is multiplied by; the weights of slots are multiplied in the top-k sum."""
    return weights if routed.gather_indices is None else None


def _run_second(call: LayerCall, routed: Routed, act: Tensor, tensors: LayerTensors) -> Tensor:
    """The output of activated rows."""
    if not call.weighted:
        return call.second.to_flat(act, tensors.w_down, routed, tensors.down_bias)
    bias, weights = tensors.down_bias, _row_weights(routed, tensors.weights)
    if bias is None or weights is None:
        return call.second.to_output(act, tensors.w_down, routed, bias, tensors.weights, call.out)
    exact = call.second.in_order(act, tensors.w_down, routed, float32=True)
    out = tensors.x.new_empty(tensors.x.shape) if call.out is None else call.out
    _add_weighted_bias(exact, bias, routed.m_sizes, weights, out, routed.tails)
    if call.out is not None:
        count_write(out)
    return out


def _run_forward(call: LayerCall, routed: Routed, tensors: LayerTensors) -> tuple[Tensor, Tensor]:
    """The layer's output, and the first product, which the backward needs."""
    pre = gate_up_product((call.first, call.up), tensors.x, tensors.w_gate_up, tensors.w_up, routed)
    weights = _row_weights(routed, tensors.weights)
    text = call.activation.text()
    act = _activate(pre, tensors.gate_up_bias, routed.m_sizes, text, weights, routed.tails)
    return _run_second(_after_its_rows(call, act, tensors), routed, act, tensors), pre


def _after_its_rows(call: LayerCall, act: Tensor, tensors: LayerTensors) -> LayerCall:
    """The call with the promise that the launch ahead of its second product writes that one's rows, where it holds."""
    if not (act.is_cuda and nothing_between(tensors.w_down, tensors.down_bias, tensors.weights)):
        return call
    return call._replace(second=call.second.after_its_rows())


def _run_inference(call: LayerCall, routed: Routed, tensors: LayerTensors) -> Tensor:
    """The same output where no backward needs the first product: the GPU may store activated rows only."""
    if _row_weights(routed, tensors.weights) is not None:
        return _run_forward(call, routed, tensors)[0]
    if call.up is not None:
        concatenated = call.activation.layout == "concatenated"
        if not (concatenated and are_a_pair((call.first, call.up), tensors.w_gate_up, tensors.w_up)):
            return _run_forward(call, routed, tensors)[0]
        weights: tuple[Any, Any] = tensors.w_gate_up, tensors.w_up
        text = call.activation.text()
        act = call.first.both_from_tokens(tensors.x, *weights, routed, tensors.gate_up_bias, text)
        return _run_second(call, routed, act, tensors)
    act = call.first.activated_from_tokens(tensors.x, tensors.w_gate_up, tensors.gate_up_bias, call.activation, routed)
    return _run_second(_after_its_rows(call, act, tensors), routed, act, tensors)


class ExpertLayer(torch.autograd.Function):
    """The layer with its gradients; `moe_mlp` and `experts_mlp` are the checked ways in.

    Saved for the backward are x, the first product and the routing. With a the activation of row r, w its weight and t
    its token: dw = <d_out[t] W_down, a>, and dW_down adds d_out[t]^T (w a). So the output's gradient is read where it
    is, one pass over the rows recomputes the activation and makes everything that depends on it, and nothing of size
    [M, H] is written but the rows that the top-k sum of dX reads. With a capacity M is that.
    """

    @staticmethod
    def forward(
        call: LayerCall, rest: tuple[int, str], m_sizes: Tensor, gather_indices: Tensor | None,
        positions: Tensor | None, *arguments: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`rest` is what else Routed has, `arguments` are those of LayerTensors, one by one: autograd looks for tensors
        at the top only. Where weights are quantised, their values come in their places and their scales at the end."""
        routed = Routed(m_sizes, gather_indices, rest[0], positions, rest[1])
        out, pre = _run_forward(call, routed, joined(call, LayerTensors(*arguments[:TENSORS]), arguments[TENSORS:]))
        if call.out is None:
            return out, pre
        # Another tensor of the caller's memory: that which was given takes part in no graph and serves the next call.
        # Compiled code gets a copy: it would take such a tensor for its input, which has no gradient.
        return out.clone() if torch.compiler.is_compiling() else out.detach(), pre

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, rest, m_sizes, gather_indices, positions, *arguments = inputs
        tensors, scales = LayerTensors(*arguments[:TENSORS]), arguments[TENSORS:]
        pre = output[1]
        ctx.mark_non_differentiable(pre)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # or `pre` would get a gradient of zeros; Dynamo makes none
        need_x, need_gate_up, need_up = ctx.needs_input_grad[BEFORE : BEFORE + 3]
        ctx.save_for_backward(
            tensors.x if need_gate_up or need_up else None,
            tensors.w_gate_up if need_x else None,
            tensors.w_up if need_x else None,
            tensors.w_down,
            tensors.weights,
            tensors.gate_up_bias,
            tensors.down_bias,
            pre,
            m_sizes,
            gather_indices,
            positions if need_x else None,
            *scales,
        )
        ctx.compact = positions is not None
        ctx.call = call
        ctx.rest = rest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        found = differentiated_once(ctx.call.name, _gradients, ctx, gradients[0])
        frozen = (None,) * (len(ctx.needs_input_grad) - BEFORE - TENSORS)  # scales
        return *(None,) * BEFORE, *found, *frozen

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal(args[0].name)


class _Computed:
    """The weight gradients of one backward, at once or later."""

    def __init__(self, ctx: Any) -> None:
        self._later: WeightGradients | None = ctx.call.later
        self._w = ctx.call.later_w
        self._waiting: list[tuple[Tensor, WeightGradient]] = []

    def take(self, which: int, gradient: WeightGradient) -> Tensor | None:
        """`which` of w_gate_up, w_up and w_down."""
        if self._later is None:
            return gradient.compute()
        self._waiting.append((self._w[which], gradient))
        return None

    def leave(self) -> None:
        if self._later is not None:
            self._later.add(self._waiting)


def _first_weight_gradients(
    ctx: Any, d_pre: Tensor, x: Tensor, routed: Routed, dw: _Computed
) -> tuple[Tensor | None, Tensor | None]:
    """Those of w_gate_up and w_up, each if needed."""
    need_gate_up, need_up = ctx.needs_input_grad[BEFORE + 1 : BEFORE + 3]
    first, up = ctx.call.first, ctx.call.up
    if up is None:
        return dw.take(0, first.gradient_of_first(d_pre, x, routed)) if need_gate_up else None, None
    middle = d_pre.size(1) // 2
    d_gate = dw.take(0, first.gradient_of_first(d_pre[:, :middle], x, routed)) if need_gate_up else None
    d_up = dw.take(1, up.gradient_of_first(d_pre[:, middle:], x, routed)) if need_up else None
    return d_gate, d_up


def through_activation(
    call: LayerCall, rows: Tensor, pre: Tensor, routed: Routed, t: LayerTensors, d_out: Tensor, compact: bool,
    need_rows: bool, need_weights: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gradients of the first product and of the weights, from `rows`, that of the activated ones: with need_rows
    they hold the weighted activation afterwards."""
    biased = need_weights and t.down_bias is not None
    # Which indices are in range only the weights of slots say; without them a capacity's rows need none.
    indices = None if compact and t.weights is None else routed.gather_indices
    d_pre, dots = _activate_backward(
        rows, pre, t.gate_up_bias, routed.m_sizes, indices, t.weights, routed.topk,
        d_out if biased else None, t.down_bias if biased else None,
        call.activation.text(), need_rows, need_weights, routed.tails,
    )  # fmt: skip
    if not need_weights:
        return d_pre, None
    assert t.weights is not None
    return d_pre, dots.view(t.weights.shape).to(t.weights.dtype)


def _gradients(ctx: Any, d_out: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Those of LayerTensors, each if needed."""
    need_x, need_gate_up, need_up, need_down, need_weights, need_gate_up_bias, need_down_bias = ctx.needs_input_grad[
        BEFORE : BEFORE + TENSORS
    ]
    call: LayerCall = ctx.call
    t = joined(call, LayerTensors(*saved[:TENSORS]), saved[TENSORS + 4 :])
    pre, m_sizes, gather_indices, positions = saved[TENSORS : TENSORS + 4]
    routed = Routed(m_sizes, gather_indices, ctx.rest[0], positions, ctx.rest[1])
    if need_x:
        name = "grad_rows_out" if gather_indices is None else "grad_x_out"
        refuse_memory_of(name, call.grad_out, "the gradient of the result", d_out)
    dw = _Computed(ctx)
    d_x = d_gate_up = d_up = d_down = d_weights = d_gate_up_bias = d_down_bias = None
    if need_x or need_gate_up or need_up or need_down or need_weights or need_gate_up_bias:
        rows = call.second.from_output_gradient(d_out, t.w_down, routed)  # [M, I]
        d_pre, d_weights = through_activation(call, rows, pre, routed, t, d_out, ctx.compact, need_down, need_weights)
        if need_down:  # `rows` now holds the weighted activation
            d_down = dw.take(2, call.second.gradient_of_second(d_out, rows, routed))
        del rows
        if need_gate_up_bias:
            d_gate_up_bias = _expert_sums(d_pre, m_sizes, None, None, 1)
        d_gate_up, d_up = _first_weight_gradients(ctx, d_pre, t.x, routed, dw)
        if need_x and call.up is None:
            d_x = call.first.tokens_gradient(d_pre, t.w_gate_up, routed, call.grad_out)
        elif need_x:
            assert t.w_up is not None
            assert call.up is not None
            pair = (call.first, call.up)
            d_x = tokens_gradient_of_pair(pair, d_pre, t.w_gate_up, t.w_up, routed, call.grad_out)
    if need_down_bias:
        d_down_bias = down_bias_gradient(d_out, routed, t.weights)
    dw.leave()
    return d_x, d_gate_up, d_up, d_down, d_weights, d_gate_up_bias, d_down_bias


def down_bias_gradient(d_out: Tensor, routed: Routed, weights: Tensor | None) -> Tensor:
    indices = routed.gather_indices
    if indices is None and weights is not None:  # the sums know weights by index only
        indices = torch.arange(d_out.size(0), device=d_out.device, dtype=torch.int32)
    return _expert_sums(d_out, routed.m_sizes, indices, weights, routed.topk)


def _wants_gradients(tensors: LayerTensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def require_later(call: LayerCall, tensors: LayerTensors) -> None:
    """Refuses a queue for gradients that do not exist: before anything is routed."""
    if call.later is None or not _wants_gradients(tensors):
        return
    for w in tensors[1:4]:
        if isinstance(w, Packed):
            raise TypeError(f"weight_gradients is {call.later} with a weight in {w.word}; {REFUSED_GRADIENT}")


def run_layer(call: LayerCall, routed: Routed, tensors: LayerTensors) -> Tensor:
    """The layer's output, with its gradients where they are wanted; `require_later` comes before."""
    if _wants_gradients(tensors):
        if call.later is not None:
            weights: tuple[Any, Any, Any] = tensors[1:4]
            call = call._replace(later_w=weights)
            first, up, down = (None if w is None else apart(w) for w in weights)
            tensors = tensors._replace(w_gate_up=first, w_up=up, w_down=down)  # type: ignore[arg-type]
        m_sizes, gather_indices, topk, positions, tails = routed
        routing = (topk, tails), m_sizes, gather_indices, positions
        flat, scales = split(tensors, (1, 2, 3))
        out: Tensor = apply_function(ExpertLayer, call, *routing, *flat, *scales)[0]
        return out
    return _run_inference(call, routed, tensors)
