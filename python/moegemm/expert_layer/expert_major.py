"""The expert layer of rows that come and go in expert order, as dispatchers of expert parallelism hand them over."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moegemm.activations import Activation
from moegemm.expert_layer.arguments import (
    ExpertTensors,
    Given,
    LayerOptions,
    Pair,
    expert_arguments,
    plain_shapes,
    row_weights_like,
)
from moegemm.expert_layer.buffers import LayerBuffers, checked_buffers, returned
from moegemm.expert_layer.function import LayerCall, LayerTensors, require_later, run_layer
from moegemm.expert_layer.weights import Routed, stored_weights
from moegemm.operators.errors import explain
from moegemm.operators.gradients.derivatives import refuse_forward_mode
from moegemm.operators.gradients.weight_gradients import WeightGradients, require_queue
from moegemm.operators.loading import ops
from moegemm.operators.raw import autocast_dtype, cast_for_autocast, torch_allows_tf32
from moegemm.operators.rules import reads_values, require_tensor
from moegemm.operators.segments import ZERO, masked, placed, tail_options

_check_expert_rows: Callable[..., None] = ops.check_expert_rows.default


class _Rows(NamedTuple):
    """Rows as a matrix, and where those of each expert are."""

    rows: Tensor  # [R, H]
    sizes: Tensor  # [E]
    starts: Tensor | None
    both: Tensor | None  # ends [1, E], or sizes and starts [2, E]: what the operators take
    row_weights: Tensor | None  # [R]
    capacity: int | None = None  # rows that each expert has room for, from e * capacity on

    def segments(self) -> Tensor:
        """In the operators' one argument."""
        if self.capacity is not None:
            _check_capacity(self.sizes, self.capacity)
            return masked(self.sizes, self.capacity)
        return placed(self.sizes, self.starts, "sizes") if self.both is None else self.both


def _check_capacity(sizes: Tensor, capacity: int) -> None:
    """In check mode, as `masked` clips what the operators would name."""
    if reads_values(sizes) and bool((sizes > capacity).any()):
        expert = int((sizes > capacity).nonzero()[0])
        raise ValueError(
            f"sizes[{expert}] is {int(sizes[expert])}; with rows [E, capacity, H] it must be at most {capacity}, the "
            "capacity"
        )


def _masked(rows: Tensor, sizes: Tensor, starts: Tensor | None, row_weights: Tensor | None) -> _Rows:
    """[E, capacity, H]: the rows of expert e begin at e * capacity, and are no more than that."""
    experts, capacity, _ = rows.shape
    if starts is not None:
        raise ValueError(
            f"starts is given with rows {list(rows.shape)}; those of [E, capacity, H] begin at e * capacity"
        )
    if sizes.dim() != 1 or sizes.size(0) != experts:
        raise ValueError(f"sizes is {list(sizes.shape)}; with rows {list(rows.shape)} its shape must be [{experts}]")
    if row_weights is not None:
        if row_weights.shape != rows.shape[:2]:
            raise ValueError(
                f"row_weights is {list(row_weights.shape)}; with rows {list(rows.shape)} its shape must be "
                f"{list(rows.shape[:2])}"
            )
        row_weights = row_weights.flatten()
    return _Rows(rows.flatten(0, 1), sizes, None, None, row_weights, capacity)


def _laid_out(rows: Tensor, sizes: Tensor, starts: Tensor | None, row_weights: Tensor | None) -> _Rows:
    require_tensor("rows", rows)
    require_tensor("sizes", sizes)
    require_tensor("starts", starts, optional=True)
    require_tensor("row_weights", row_weights, optional=True)
    if rows.dim() == 3:
        return _masked(rows, sizes, starts, row_weights)
    if sizes.dim() != 2:
        return _Rows(rows, sizes, starts, None, row_weights)
    if sizes.size(0) not in (1, 2) or starts is not None:
        given = "" if starts is None else " and starts given"
        raise ValueError(
            f"sizes is {list(sizes.shape)}{given}; its shape must be [E], or without starts [1, E] for ends or [2, E] "
            "for sizes and starts"
        )
    return _Rows(rows, sizes[0], None, sizes, row_weights)


def _checked(laid_out: _Rows, experts: ExpertTensors, activation: str, transposed: bool) -> _Rows:
    """Cast as autocast asks and checked against the experts."""
    rows, sizes, row_weights = laid_out.rows, laid_out.sizes, laid_out.row_weights
    dtype = autocast_dtype(rows.device)
    if dtype is not None:
        rows = cast_for_autocast(rows, dtype)
    if row_weights is not None:
        row_weights = row_weights_like("row_weights", row_weights, rows)
    w_gate_up, w_up, w_down = plain_shapes(experts[:3], rows)
    gate_up_bias, down_bias = experts[3:]
    given = (rows, w_gate_up, w_down, sizes, row_weights, gate_up_bias, down_bias)
    try:
        _check_expert_rows(*given, activation, transposed, w_up)
    except RuntimeError as error:
        raise explain(error, {"rows": rows, "sizes": sizes, "row_weights": row_weights, **experts.named()}) from None
    return laid_out._replace(rows=rows, row_weights=row_weights)


def experts_mlp(
    rows: Tensor,
    w_gate_up: Given | Pair,
    w_down: Given,
    sizes: Tensor,
    *,
    starts: Tensor | None = None,
    row_weights: Tensor | None = None,
    activation: str | Activation = "swiglu",
    layout: str = "concatenated",
    transposed: bool = False,
    gate_up_bias: Tensor | Pair | None = None,
    down_bias: Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    up_offset: float | None = None,
    tails: str = ZERO,
    expected_rows: int | None = None,
    accumulate: bool = False,
    allow_tf32: bool | None = None,
    weight_gradients: WeightGradients | None = None,
    out: Tensor | None = None,
    grad_rows_out: Tensor | None = None,
) -> Tensor:
    """The experts alone: out[r] = row_weights[r] * expert(e, rows[r]) for the rows r of each expert e. Differentiable.

    Shapes, with C = 2 I for a gated activation and C = I for one without:
        rows: [R, H], or [E, capacity, H] with sizes[e] rows of expert e; bf16, fp16 or fp32. Returns the same shape.
        sizes: [E], or [1, E] for cumulative ends, or [2, E] for sizes and starts; starts: [E]. int32 or int64, both
            alike, on the device of rows.
        row_weights: the shape of rows without H; fp32 or the rows' dtype; None for none.
        w_gate_up: [E, C, H], w_down: [E, H, I]; with transposed [E, H, C] and [E, I, H]. No layout is copied.
        gate_up_bias: [E, C], down_bias: [E, H]; None for none. w_gate_up and gate_up_bias may be pairs (gate, up).
        Weights may be QuantizedWeights, which get no gradient.

    Expert e has sizes[e] rows from starts[e] on; without starts those that follow the rows of expert e - 1. Rows of no
    expert become zero in the result and in the gradient, whatever they hold; tails="undefined" neither reads nor writes
    them. expected_rows is how many rows the experts have together, about: kernels are chosen for that many, not for R;
    torch.compile drops it where it is not one number for all calls.
    Nothing synchronises: sizes and starts may change while a CUDA graph is replayed.
    A row is multiplied by its weight in fp32 where it is activated, and so is its down bias where that is added.

    activation, layout, alpha, limit, up_offset, accumulate, allow_tf32 and weight_gradients are those of moe_mlp.
    Gradients for rows, row_weights, weights and biases, each computed only if needed. out and grad_rows_out are memory
    for the result and for the rows' gradient, for instance that of an exchange; the result is another tensor with that
    memory, or where torch.compile trains a copy of it. Calls of one backward need a grad_rows_out each.

    >>> import torch, moegemm
    >>> rows, gate_up, down = torch.randn(6, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    >>> moegemm.experts_mlp(rows, gate_up, down, torch.tensor([3, 0, 1, 2])).shape
    torch.Size([6, 16])
    """
    options: LayerOptions = {
        "layout": layout, "transposed": transposed, "gate_up_bias": gate_up_bias, "down_bias": down_bias,
        "alpha": alpha, "limit": limit, "up_offset": up_offset,
    }  # fmt: skip
    laid_out = _laid_out(rows, sizes, starts, row_weights)
    chosen, experts = expert_arguments(w_gate_up, w_down, activation, options, rows.device)
    used = _checked(laid_out, experts, chosen.text(), transposed)
    require_queue(weight_gradients)
    tf32 = torch_allows_tf32(used.rows) if allow_tf32 is None else allow_tf32
    words = tail_options(tails, expected_rows)
    stored = stored_weights(experts[:3], (w_gate_up, w_down), transposed, tf32, accumulate, words)
    tensors = LayerTensors(used.rows, *stored[:3], used.row_weights, *experts[3:])
    refuse_forward_mode("experts_mlp", *tensors)
    inputs = {"rows": used.rows, "row_weights": used.row_weights, "sizes": sizes, "starts": starts, **experts.named()}
    buffers = LayerBuffers(out, grad_rows_out, ("out", "grad_rows_out"))
    memory = checked_buffers(buffers, rows, used.rows.dtype, inputs)
    call = LayerCall("experts_mlp", chosen, *stored[3:], weight_gradients, None, *memory)
    require_later(call, tensors)
    routed = Routed(used.segments(), None, tails=words)
    try:
        result = run_layer(call, routed, tensors)
    except RuntimeError as error:
        raise explain(error, inputs, sizes_name="sizes") from None
    return returned(result, memory[0], out, rows.shape)
