"""The expert layer of rows that come and go in expert order, as dispatchers of expert parallelism hand them over."""

from collections.abc import Callable

import torch
from torch import Tensor

from moegemm.activations import Activation
from moegemm.expert_layer.buffers import LayerBuffers, checked_buffers
from moegemm.expert_layer.function import LayerCall, LayerTensors, run_layer
from moegemm.expert_layer.weights import Routed, stored_weights
from moegemm.layer_arguments import ExpertTensors, LayerOptions, Pair, expert_arguments, require_tensors
from moegemm.operators.derivatives import refuse_forward_mode
from moegemm.operators.errors import explain
from moegemm.operators.loading import ops
from moegemm.operators.raw import autocast_dtype, torch_allows_tf32
from moegemm.operators.weight_gradients import WeightGradients, require_queue

_check_expert_rows: Callable[..., None] = ops.check_expert_rows.default


def _checked_rows(
    rows: Tensor, sizes: Tensor, row_weights: Tensor | None, experts: ExpertTensors, activation: str, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows and their weights, cast as autocast asks and checked against the experts."""
    dtype = autocast_dtype(rows.device)
    if dtype is not None:
        rows = rows.to(dtype)
    if row_weights is not None and row_weights.dtype not in (torch.float32, rows.dtype):
        row_weights = row_weights.float()
    w_gate_up, w_up, w_down, gate_up_bias, down_bias = experts
    given = (rows, w_gate_up, w_down, sizes, row_weights, gate_up_bias, down_bias)
    try:
        _check_expert_rows(*given, activation, transposed, w_up)
    except RuntimeError as error:
        raise explain(error, {"rows": rows, "sizes": sizes, "row_weights": row_weights, **experts._asdict()}) from None
    return rows, row_weights


def experts_mlp(
    rows: Tensor,
    w_gate_up: Tensor | Pair,
    w_down: Tensor,
    sizes: Tensor,
    *,
    row_weights: Tensor | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "concatenated",
    transposed: bool = False,
    gate_up_bias: Tensor | Pair | None = None,
    down_bias: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    up_offset: float | None = None,
    accumulate: bool = False,
    allow_tf32: bool | None = None,
    weight_gradients: WeightGradients | None = None,
    out: Tensor | None = None,
    grad_rows_out: Tensor | None = None,
) -> Tensor:
    """The experts alone: out[r] = row_weights[r] * expert(e, rows[r]) for the rows r of each expert e. Differentiable.

    Shapes, with C = 2 I for a gated activation and C = I for one without:
        rows: [R, H]; bf16, fp16 or fp32. sizes: [E], int32 or int64, on the device of rows. Returns [R, H].
        row_weights: [R], fp32 or the rows' dtype; None for none.
        w_gate_up: [E, C, H], w_down: [E, H, I]; with transposed [E, H, C] and [E, I, H]. No layout is copied.
        gate_up_bias: [E, C], down_bias: [E, H]; None for none. w_gate_up and gate_up_bias may be pairs (gate, up).

    Expert e has the sizes[e] rows that follow those of expert e - 1. Rows past the last are zero in the result and get
    no gradient, whatever they hold. Nothing synchronises: sizes may change while a CUDA graph is replayed.
    A row is multiplied by its weight where it is activated, and the down bias likewise: before anything is rounded.

    activation, layout, alpha, limit, up_offset, accumulate, allow_tf32 and weight_gradients are those of moe_mlp.
    Gradients for rows, row_weights, weights and biases, each computed only if needed. out and grad_rows_out are memory
    for the result and for the rows' gradient, for instance that of an exchange; with gradients on, the result is
    another tensor with that memory.

    >>> import torch, moegemm
    >>> rows, gate_up, down = torch.randn(6, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    >>> moegemm.experts_mlp(rows, gate_up, down, torch.tensor([3, 0, 1, 2])).shape
    torch.Size([6, 16])
    """
    options: LayerOptions = {
        "layout": layout, "transposed": transposed, "gate_up_bias": gate_up_bias, "down_bias": down_bias,
        "alpha": alpha, "limit": limit, "up_offset": up_offset,
    }  # fmt: skip
    require_tensors({"rows": rows, "sizes": sizes}, {"row_weights": row_weights})
    chosen, experts = expert_arguments(w_gate_up, w_down, activation, options, rows.device)
    used, weights = _checked_rows(rows, sizes, row_weights, experts, chosen.text(), transposed)
    require_queue(weight_gradients)
    tf32 = torch_allows_tf32(used) if allow_tf32 is None else allow_tf32
    stored = stored_weights(experts[:3], (w_gate_up, w_down), transposed, tf32, accumulate)
    tensors = LayerTensors(used, *stored[:3], weights, *experts[3:])
    refuse_forward_mode("experts_mlp", *tensors)
    inputs = {"rows": used, "row_weights": weights, "sizes": sizes, **experts._asdict()}
    names = "out", "grad_rows_out"
    buffers = checked_buffers(LayerBuffers(out, grad_rows_out, names), rows, used.dtype, inputs)
    call = LayerCall("experts_mlp", chosen, *stored[3:], weight_gradients, None, *buffers)
    try:
        result = run_layer(call, Routed(sizes, None), tensors)
    except RuntimeError as error:
        raise explain(error, inputs) from None
    return result if out is None or result is not buffers[0] else out
