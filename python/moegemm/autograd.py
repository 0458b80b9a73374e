"""The product as torch.autograd.Functions: what transforms, tangents and torch.compile see of it.

Eager calls take a shorter way to the same gradients, operators/shortcuts.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegemm.operators.gradients.derivatives import (
    forward_mode_active,
    primal_of,
    refuse_forward_mode,
    refuse_traced_forward_mode,
    vmap_refusal,
)
from moegemm.operators.gradients.product import DEFAULTS, FORWARD_ONLY, Call, Settings, backward, needed, slots_of
from moegemm.operators.options import AUTOTUNE, FLOAT32_OUTPUT, MULTIPLY, without
from moegemm.operators.packed import Packed
from moegemm.operators.row_products import forward as _forward
from moegemm.operators.shortcuts import apply_function

__all__ = ["DEFAULTS", "Call", "DualGroupedGemm", "GroupedGemm", "Settings", "function_product"]


class GroupedGemm(torch.autograd.Function):
    """The product with its gradients; `grouped_gemm` is the checked way in.

    Arguments of `apply`: X, W, m_sizes, gather_indices, router_weights and the tuple (topk, options, settings), with
    words of moegemm.operators.options and a Settings. Of a quantised W, which gets no gradient, the values come in its
    place, its scales and its word at the end. Nothing but those tensors is saved, and each only if a wanted gradient
    reads it.

    >>> import torch, moegemm
    >>> X, W = torch.ones(3, 4), torch.ones(2, 5, 4, requires_grad=True)        # [M, K], [E, N, K]
    >>> m_sizes = torch.tensor([1, 2])
    >>> moegemm.GroupedGemm.apply(X, W, m_sizes, None, None, (1, "", moegemm.autograd.DEFAULTS)).sum().backward()
    >>> W.grad[:, 0, 0]
    tensor([1., 2.])
    """

    @staticmethod
    def forward(
        X: Tensor,
        W: Tensor,
        m_sizes: Tensor,
        gather_indices: Tensor | None,
        router_weights: Tensor | None,
        call: Call,
        scales: Tensor | None = None,
        word: str = "",
    ) -> Tensor:
        topk, options, settings = call
        weight = W if scales is None else Packed(W, scales, word)
        return _forward(X, weight, m_sizes, gather_indices, router_weights, topk, options, settings.config_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        X, W, m_sizes, gather_indices, router_weights, call, *packed = inputs
        word = packed[1] if packed else ""
        wanted = ctx.needs_input_grad
        need_x, need_w, need_weights = needed((wanted[0], wanted[1], wanted[4]), call)
        ctx.save_for_backward(
            X if need_w or need_weights else None,
            W if need_x or need_weights else None,
            m_sizes,
            gather_indices,
            router_weights,
            *(packed[:1] if word else ()),
        )
        ctx.call = call
        ctx.word = word
        ctx.flat_weights = W.dim() == 2
        ctx.slots = slots_of(X, gather_indices, call, traced=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        dX, dW, d_weights = backward(ctx, ctx.call, (wanted[0], wanted[1], wanted[4]), ctx.flat_weights, *gradients)
        return dX, dW, None, None, d_weights, None, None, None  # torch drops None for arguments that were not given

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal("grouped_gemm")


class DualGroupedGemm(GroupedGemm):
    """GroupedGemm with its forward-mode derivative, for calls that may see tangents. Dynamo traces no Function that has
    one."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        GroupedGemm.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:5])
        ctx.set_materialize_grads(False)  # a product with a tangent of zeros costs as much as any other
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        dY = gradients[0]
        if dY is None:
            return (None,) * 8
        return GroupedGemm.backward(ctx, dY.to(ctx.dtype))  # that of a term of a sum is fp32

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Y is linear in X, in W and in router_weights: one product for each that has a tangent, summed in fp32."""
        X, W, m_sizes, gather_indices, router_weights = ctx.saved_tensors
        X, W = primal_of(X), primal_of(W)
        if router_weights is not None:
            router_weights = primal_of(router_weights)
        topk, options, settings = ctx.call
        options = without(without(options, FORWARD_ONLY), AUTOTUNE)
        dX, dW, d_weights = tangents[0], tangents[1], tangents[4] if MULTIPLY in options else None
        changed = []
        if dX is not None:
            changed.append((dX, W, router_weights))
        if dW is not None:
            changed.append((X, dW, router_weights))
        if d_weights is not None:
            changed.append((X, W, d_weights))
        if len(changed) > 1:
            options += FLOAT32_OUTPUT
        call = topk, options, Settings(settings.config_forward)
        terms: list[Tensor] = [_tangent_product(x, w, m_sizes, gather_indices, s, call) for x, w, s in changed]
        return torch.stack(terms).sum(0).to(X.dtype) if len(terms) > 1 else terms[0]


class _TangentProduct(DualGroupedGemm):
    """A product with a tangent. jacfwd hands over many tangents at once, as a batch."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        def of_one(sample: int) -> list[Any]:
            tensors = zip(args[:5], in_dims[:5], strict=True)
            return [t if dim is None else t.select(dim, sample) for t, dim in tensors]

        return torch.stack([_tangent_product(*of_one(i), args[5]) for i in range(info.batch_size)]), 0


_tangent_product: Callable[..., Tensor] = _TangentProduct.apply


_apply_with_tangents: Callable[..., Tensor] = DualGroupedGemm.apply


def function_product(
    X: Tensor,
    W: Tensor | Packed,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    router_weights: Tensor | None,
    call: Call,
) -> Tensor:
    """The product with a quantised W, or where tracing, a transform of torch.func or tangents may look at it."""
    w: Any = W
    packed: tuple[Any, ...] = ()
    if isinstance(W, Packed):
        refuse_forward_mode("grouped_gemm with a quantised W", X, router_weights)
        w, packed = W.values, (W.scales, W.word)
    elif forward_mode_active():
        refuse_traced_forward_mode("grouped_gemm")
        return _apply_with_tangents(X, W, m_sizes, gather_indices, router_weights, call)
    if torch.is_grad_enabled() and (
        X.requires_grad or W.requires_grad or (router_weights is not None and router_weights.requires_grad)
    ):
        result: Tensor = apply_function(GroupedGemm, X, w, m_sizes, gather_indices, router_weights, call, *packed)
        return result
    topk, options, settings = call
    return _forward(X, W, m_sizes, gather_indices, router_weights, topk, options, settings.config_forward)
