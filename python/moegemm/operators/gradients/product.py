"""The gradients of one product with respect to X, W and router_weights, from what its forward saved."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.operators.errors import explain
from moegemm.operators.gradients.derivatives import once_only, refuse_tangents_in_backward
from moegemm.operators.gradients.main_grad import MainGrad
from moegemm.operators.gradients.weight_gradients import WeightGradient, WeightGradients
from moegemm.operators.loading import ops
from moegemm.operators.options import (
    AUTOTUNE,
    CHECK,
    MULTIPLY,
    PERMUTE_X,
    TAILS_UNDEFINED,
    WARN_AT_ONCE,
    without,
)
from moegemm.operators.packed import Packed
from moegemm.operators.row_products import dx as _dx
from moegemm.operators.row_products import dx_out as _dx_out
from moegemm.operators.rules import is_surely
from moegemm.tuning.autotune import after_chosen_kernel

_dw: Callable[..., Tensor] = ops.dw.default
_combine: Callable[..., Tensor] = ops.combine.default
_scale_rows: Callable[..., Tensor] = ops.scale_rows.default

FORWARD_ONLY = CHECK  # the same routing is not validated again in backward


class Settings(NamedTuple):
    """What a call asks for beyond the defaults."""

    config_forward: list[int] | None = None
    config_dx: list[int] | None = None
    config_dw: list[int] | None = None
    dx_only: bool = False
    dw_only: bool = False
    main_grad: MainGrad | None = None  # dW is added there
    later: WeightGradients | None = None  # dW is left to it
    later_w: Tensor | None = None  # the W of a product that does


# topk, options and settings of one call. They travel as one argument: autograd spends time on each.
Call = tuple[int, str, Settings]
DEFAULTS = Settings()
PLAIN: Call = (1, "", DEFAULTS)  # a call that asks for nothing but the product


def needed(wanted: tuple[bool, bool, bool], call: Call) -> tuple[bool, bool, bool]:
    """Whether to compute dX, dW and the gradient of router_weights, from those that autograd wants."""
    _, options, settings = call
    if settings.dw_only:
        return False, wanted[1], False
    return wanted[0], wanted[1] and not settings.dx_only, wanted[2] and MULTIPLY in options


def slots_of(X: Tensor, gather_indices: Tensor | None, call: Call, traced: bool = False) -> int | None:
    """T * topk where X is gathered and the indices are not as many, or may not be, but a capacity; None otherwise.
    traced: numbers may be symbols, which eager calls need not ask."""
    topk, options, _ = call
    if PERMUTE_X not in options or gather_indices is None:
        return None
    slots = X.size(0) * topk
    same = gather_indices.size(0) == slots
    return None if (is_surely(same) if traced else same) else slots


def _joined(saved: tuple[Any, ...], word: str) -> tuple[Any, ...]:
    """What was saved, with a quantised W as the products take it: its scales were saved last."""
    return (saved[0], Packed(saved[1], saved[-1], word), *saved[2:-1]) if word else saved


def backward(
    ctx: Any, call: Call, wanted: tuple[bool, bool, bool], flat_weights: bool | None, dY: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of X, W and router_weights as autograd gets them. `flat_weights`: W is [E * N, K]; None asks the
    one that was saved."""
    topk, options, settings = call
    options = without(options, FORWARD_ONLY)
    call = (topk, options, settings)
    saved = _joined(ctx.saved_tensors, getattr(ctx, "word", ""))  # once: checkpointing does not hand it out again
    refuse_tangents_in_backward("grouped_gemm", dY, *saved)
    if flat_weights is None:
        flat_weights = saved[1].dim() == 2
    try:
        with torch.no_grad():
            dX, dW, d_weights = _gradients(needed(wanted, call), call, getattr(ctx, "slots", None), dY, *saved)
            if dW is not None and flat_weights:
                dW = dW.flatten(0, -2)
    except RuntimeError as error:
        raise explain(error, {}) from None
    manual = settings.config_dx is not None or settings.config_dw is not None
    chosen = AUTOTUNE in options or (manual and WARN_AT_ONCE not in options)
    if chosen and not torch.compiler.is_compiling():
        after_chosen_kernel(stacklevel=1)
    dX, dW, d_weights = once_only("grouped_gemm", (dX, dW, d_weights), (dY, *saved))
    return dX, dW, d_weights


def _gradients(
    needs: tuple[bool, bool, bool],
    call: Call,
    slots: int | None,
    dY: Tensor,
    X: Tensor | None,
    W: Tensor | Packed | None,
    m_sizes: Tensor,
    gather_indices: Tensor | None = None,
    router_weights: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dW and the gradient of router_weights, each if needed."""
    need_x, need_w, need_weights = needs
    topk, options, settings = call
    dX = dW = d_weights = None
    if need_weights:
        assert router_weights is not None
        # The unscaled product serves both: its dot with X is the weights' gradient, scaled it is dX.
        product = _dx(dY, W, m_sizes, gather_indices, None, topk, without(options, MULTIPLY), settings.config_dx)
        dots = _scale_rows(product, X, m_sizes, gather_indices, router_weights, topk)
        d_weights = dots.view(router_weights.shape)
        dX = product if need_x else None
    elif need_x:
        assert W is not None
        # A token's gradient is the sum of its flat rows: of those that no position names, too.
        dx_options = without(options, TAILS_UNDEFINED) if PERMUTE_X in options else options
        arguments = (dY, W, m_sizes, gather_indices, router_weights, topk, dx_options, settings.config_dx)
        if slots is None:
            dX = _dx(*arguments)
        else:
            dX = dY.new_empty((slots, W.size(-1)))
            _dx_out(*arguments, dX)
        if PERMUTE_X in options and topk > 1:
            dX = _combine(dX, None, topk, False)
    if need_w and settings.main_grad is None and settings.later is None:
        dW = _dw(dY, X, m_sizes, gather_indices, router_weights, topk, options, settings.config_dw)
    elif need_w or settings.later is not None:
        given = dY, X, m_sizes, gather_indices, router_weights, topk, options, settings.config_dw, settings.main_grad
        dW = _weight_gradient(need_w, settings, given)
    return dX, dW, d_weights


def _weight_gradient(need_w: bool, settings: Settings, arguments: tuple[Any, ...]) -> Tensor | None:
    """dW of a call that says where it goes, or when it is computed."""
    gradient = WeightGradient(*arguments)
    if settings.later is None:
        return gradient.compute()
    assert settings.later_w is not None
    settings.later.add([(settings.later_w, gradient)] if need_w else [])
    return None
