"""The derivatives of `combine`, backward and forward, in plain torch: they can be differentiated again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegemm.operators.gradients.derivatives import primal_of, vmap_refusal
from moegemm.operators.loading import ops

_combine: Callable[..., Tensor] = ops.combine.default


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weights, topk, _ = inputs
    weights_need_grad = weights is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(rows if weights_need_grad else None, weights)
    ctx.topk = topk
    ctx.rows_dtype = rows.dtype


def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights = ctx.saved_tensors
    topk = ctx.topk
    tokens, columns = gradient.shape
    d_rows = d_weights = None
    if ctx.needs_input_grad[0]:
        spread = gradient.unsqueeze(1).expand(tokens, topk, columns)
        if weights is not None:
            spread = spread.float() * weights.reshape(tokens, topk, 1).float()
        d_rows = spread.to(ctx.rows_dtype).reshape(tokens * topk, columns)
    if rows is not None:
        products = rows.reshape(tokens, topk, columns).float() * gradient.unsqueeze(1).float()
        d_weights = products.sum(-1).to(weights.dtype).reshape(weights.shape)
    return d_rows, d_weights, None, None


def _combined(rows: Tensor, weights: Tensor | None, topk: int) -> Tensor:
    """What `combine` computes, before it is rounded."""
    slots = rows.reshape(rows.size(0) // topk, topk, rows.size(1)).float()
    return (slots if weights is None else slots * weights.reshape(-1, topk, 1).float()).sum(1)


class TransformedCombine(torch.autograd.Function):
    """The operator inside torch.func's transforms and beside tangents: what torch makes of a registered gradient
    refuses the former and drops the latter."""

    @staticmethod
    def forward(rows: Tensor, weights: Tensor | None, topk: int, float32_output: bool) -> Tensor:
        return _combine(rows, weights, topk, float32_output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:2])
        ctx.set_materialize_grads(False)
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None,) * 4 if gradients[0] is None else backward(ctx, gradients[0])

    @staticmethod
    def jvp(ctx: Any, d_rows: Tensor | None, d_weights: Tensor | None, *_: None) -> Tensor:
        rows, weights = ctx.saved_tensors
        terms = []
        if d_rows is not None:
            terms.append(_combined(d_rows, None if weights is None else primal_of(weights), ctx.topk))
        if d_weights is not None:
            terms.append(_combined(primal_of(rows), d_weights, ctx.topk))
        return torch.stack(terms).sum(0).to(ctx.dtype) if len(terms) > 1 else terms[0].to(ctx.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal("moegemm.combine")
