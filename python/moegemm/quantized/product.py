"""grouped_gemm with a quantised W: the product as a torch.autograd.Function, for eager and traced calls alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moegemm.operators.gradients.derivatives import refuse_forward_mode, vmap_refusal
from moegemm.operators.gradients.product import Call, backward, needed, slots_of
from moegemm.operators.options import CHECK
from moegemm.operators.packed import REFUSED_GRADIENT, Packed
from moegemm.operators.row_products import forward as _forward
from moegemm.operators.shortcuts import apply_function
from moegemm.quantized.checking import check_scales
from moegemm.quantized.weight import QuantizedWeight


class QuantizedGemm(torch.autograd.Function):
    """Gradients for X and router_weights. Saved of W are the packed values and their scales."""

    @staticmethod
    def forward(
        X: Tensor, values: Tensor, scales: Tensor, m_sizes: Tensor, gather_indices: Tensor | None,
        router_weights: Tensor | None, word: str, call: Call,
    ) -> Tensor:  # fmt: skip
        return _run(X, Packed(values, scales, word), m_sizes, gather_indices, router_weights, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        X, values, scales, m_sizes, gather_indices, router_weights, word, call = inputs
        wanted = ctx.needs_input_grad
        _, _, need_weights = needed((wanted[0], False, wanted[5]), call)
        ctx.save_for_backward(X if need_weights else None, values, m_sizes, gather_indices, router_weights, scales)
        ctx.call, ctx.word, ctx.slots = call, word, slots_of(X, gather_indices, call)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        dX, _, d_weights = backward(ctx, ctx.call, (wanted[0], False, wanted[5]), False, *gradients)
        return dX, None, None, None, None, d_weights, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal("grouped_gemm")


def _run(
    X: Tensor, W: Packed, m_sizes: Tensor, gather_indices: Tensor | None, router_weights: Tensor | None, call: Call
) -> Tensor:
    topk, options, settings = call
    return _forward(X, W, m_sizes, gather_indices, router_weights, topk, options, settings.config_forward)


def refuse_weight_gradient(W: Packed, asked: Mapping[str, object]) -> None:
    """For arguments that say what is done with a gradient of W."""
    for name, value in asked.items():
        if value is not None and value is not False:
            raise TypeError(f"{name} is {value} with W in {W.word}; {REFUSED_GRADIENT}")


def refuse_operands(**operands: object) -> None:
    """For the operands of dW, which a caller of it may take W for."""
    for name, value in operands.items():
        if isinstance(value, QuantizedWeight | Packed):
            raise TypeError(f"{name} is a quantised weight in {value.word}; {REFUSED_GRADIENT}")


def quantised_product(
    X: Tensor, W: Packed, m_sizes: Tensor, gather_indices: Tensor | None, router_weights: Tensor | None, call: Call
) -> Tensor:
    """The product, with its gradients where they are wanted."""
    refuse_forward_mode("grouped_gemm with a quantised W", X, router_weights)
    check_scales("W", W, CHECK in call[1])
    if torch.is_grad_enabled() and (X.requires_grad or (router_weights is not None and router_weights.requires_grad)):
        arguments = X, W.values, W.scales, m_sizes, gather_indices, router_weights, W.word, call
        result: Tensor = apply_function(QuantizedGemm, *arguments)
        return result
    return _run(X, W, m_sizes, gather_indices, router_weights, call)
