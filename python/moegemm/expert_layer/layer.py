"""The expert layer in one call: route, first product, activation, second product, top-k sum."""

from collections.abc import Callable

from torch import Tensor

from moegemm.activations import Activation
from moegemm.capacity import Capacity, capacity_of, route_within
from moegemm.expert_layer.arguments import Given, LayerOptions, Pair, token_arguments
from moegemm.expert_layer.buffers import LayerBuffers, checked_buffers, returned
from moegemm.expert_layer.function import LayerCall, LayerTensors, require_later, run_layer
from moegemm.expert_layer.weights import AnyWeight, Routed, stored_weights
from moegemm.operators.errors import explain
from moegemm.operators.gradients.derivatives import refuse_forward_mode
from moegemm.operators.gradients.weight_gradients import WeightGradients, require_queue
from moegemm.operators.loading import ops
from moegemm.operators.options import TAILS_UNDEFINED
from moegemm.operators.raw import torch_allows_tf32
from moegemm.operators.rules import is_surely

__all__ = ["Routed", "moe_mlp"]

_route: Callable[..., tuple[Tensor, Tensor, Tensor]] = ops.route.default


def compact_tails(capacity: Capacity | None, *weights: AnyWeight) -> str:
    """The words for rows of a capacity that no position names: neither reads nor writes them, but where a product may
    copy its operands into alignment, with all of their rows."""
    if capacity is None:
        return ""
    extents = (w.size(dim) for w in weights for dim in (1, 2))
    return TAILS_UNDEFINED if all(is_surely(extent % 8 == 0) for extent in extents) else ""


def route_rows(ids: Tensor, experts: int, capacity: Capacity | None, tails: str = "") -> Routed:
    """Which rows the slots of ids [T, topk] become. `tails`: the words of compact_tails."""
    if capacity is None:
        m_sizes, gather_indices, _ = _route(ids, experts, False, False)
        return Routed(m_sizes, gather_indices, ids.size(1))
    m_sizes, gather_indices, positions = route_within(capacity, ids, experts)
    return Routed(m_sizes, gather_indices, ids.size(1), positions, tails)


def moe_mlp(
    x: Tensor,
    w_gate_up: Given | Pair,
    w_down: Given,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    activation: str | Activation = "swiglu",
    *,
    layout: str = "concatenated",
    transposed: bool = False,
    gate_up_bias: Tensor | Pair | None = None,
    down_bias: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    up_offset: float | None = None,
    accumulate: bool = False,
    allow_tf32: bool | None = None,
    max_rows: int | None = None,
    num_tokens: Tensor | None = None,
    overflow: Tensor | None = None,
    weight_gradients: WeightGradients | None = None,
    out: Tensor | None = None,
    grad_x_out: Tensor | None = None,
) -> Tensor:
    """The expert layer: out[t] = sum over s of router_weights[t, s] * expert(expert_ids[t, s], x[t]). Differentiable.

    Shapes, with C = 2 I for a gated activation and C = I for one without:
        x: [..., H]; bf16, fp16 or fp32. expert_ids: [..., topk], int32 or int64; an id outside [0, E) adds nothing.
        router_weights: [..., topk], or None for a plain sum. Returns [..., H] in x's dtype.
        w_gate_up: [E, C, H], w_down: [E, H, I]; with transposed [E, H, C] and [E, I, H]. No layout is copied.
        gate_up_bias: [E, C], down_bias: [E, H]; None for none. w_gate_up and gate_up_bias may be pairs (gate, up).
        Weights may be QuantizedWeights [E, C, H] and [E, H, I], which get no gradient; on a GPU x is then in 16 bits.

    activation: a name with a gate ("swiglu", "geglu", "clamped_swiglu" of gpt-oss, ...) or without ("silu", "relu2",
    ...); docs/how-to/layer.md has all of them. layout says how gate and up share the C columns: "concatenated" (all
    gates, then all ups) or "interleaved". alpha, limit and up_offset change the activation's numbers:
    gate * sigmoid(alpha * gate) * (up + up_offset), with gate clamped to at most limit and up to [-limit, limit].

    Gradients for x, both weights, both biases and router_weights, each computed only if needed. Kept for the backward
    are x, the first product and the routing. accumulate adds the weights' gradients to their `main_grad`, as in
    grouped_gemm; weight_gradients, a moegemm.WeightGradients, computes them when it is told to. out and grad_x_out are
    memory for the result and for x's gradient; calls of one backward need a grad_x_out each. The same call gives the
    same bits. A CUDA graph can capture it.

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
    chosen, given, w_up = token_arguments(x, w_gate_up, w_down, expert_ids, router_weights, activation, options)
    require_queue(weight_gradients)
    tokens, gate_up, down, ids, weights, bias, second_bias = given
    tf32 = torch_allows_tf32(tokens) if allow_tf32 is None else allow_tf32
    capacity = capacity_of(ids, max_rows, num_tokens, overflow)
    words = compact_tails(capacity, gate_up, down)
    stored = stored_weights((gate_up, w_up, down), (w_gate_up, w_down), transposed, tf32, accumulate, words)
    tensors = LayerTensors(tokens, *stored[:3], weights, bias, second_bias)
    refuse_forward_mode("moe_mlp", *tensors)
    inputs = {**given._asdict(), "w_gate_up[1]": w_up}
    buffers = checked_buffers(LayerBuffers(out, grad_x_out, ("out", "grad_x_out")), x, tokens.dtype, inputs)
    call = LayerCall("moe_mlp", chosen, *stored[3:], weight_gradients, None, *buffers)
    require_later(call, tensors)
    try:
        result = run_layer(call, route_rows(ids, down.size(0), capacity, words), tensors)
    except RuntimeError as error:
        raise explain(error, given._asdict()) from None
    return returned(result, buffers[0], out, x.shape)
