"""Shorter ways through torch, each with the time that it saves. They live here and nowhere else.

A call is eager where no transform of torch.func, no tangent and no tracing looks at it. There each shortcut does what
its longer form does. The times are those of a tiny call on the CPU (8 rows, 4 experts, N = K = 64, fp32, one thread),
which takes 5 us in all without gradients and 8.5 us with them: the best of 400 rounds that took turns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegemm.operators.gradients.derivatives import inside_torch_func
from moegemm.operators.gradients.product import DEFAULTS, PLAIN, Call, backward, needed, slots_of
from moegemm.operators.loading import ops


def direct(operator: Any) -> Callable[..., Any]:
    """What an operator's `__call__` calls in turn: 5.4 us become 5.1. Dynamo only knows the operator."""
    found: Callable[..., Any] = getattr(operator, "_op", operator)
    return found


# The operator for PLAIN calls. It has seven arguments less to unpack and makes no stop at torch's autograd fallback:
# 5.0 us become 3.9. It is the only one: a bias, an activation or a permutation costs the general operator 0.3 us.
_forward_plain: Callable[[Tensor, Tensor, Tensor], Tensor] = direct(ops.forward_plain.default)
_forward: Callable[..., Tensor] = direct(ops.forward.default)


def eager_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without functorch's wrappers and argument binding: 38 us become 10.4 with GroupedGemm."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The `apply` that fits: eager_apply's where nothing looks at the call."""
    if torch.compiler.is_compiling() or inside_torch_func():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    return eager_apply(function)(*arguments)


class EagerGroupedGemm(torch.autograd.Function):
    """GroupedGemm of an eager call, with the same gradients: 10.4 us become 7.6 if it is plain, 10.7 become 9.4 if not.

    Transforms need a separate setup_context and every tensor as an argument of its own. Autograd spends time on both,
    on each argument that is no tensor, and on the dictionary of a context that gets attributes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        W: Tensor,
        m_sizes: Tensor,
        rest: tuple[Tensor | None, Call] | None = None,
        router_weights: Tensor | None = None,
    ) -> Tensor:
        """`rest` is gather_indices and the call; None for a plain call."""
        wanted = ctx.needs_input_grad
        need_x, need_w = wanted[0], wanted[1]
        if rest is None:
            ctx.save_for_backward(X if need_w else None, W if need_x else None, m_sizes)
            if not need_x:
                ctx.flat_weights = W.dim() == 2
            return _forward_plain(X, W, m_sizes)
        gather_indices, call = rest
        topk, options, settings = ctx.call = call
        slots = slots_of(X, gather_indices, call)
        if slots is not None:
            ctx.slots = slots
        if router_weights is not None or settings is not DEFAULTS:
            wants_weights = router_weights is not None and wanted[4]
            need_x, need_w, need_weights = needed((need_x, need_w, wants_weights), call)
            need_x, need_w = need_x or need_weights, need_w or need_weights
        ctx.save_for_backward(X if need_w else None, W if need_x else None, m_sizes, gather_indices, router_weights)
        if not need_x:
            ctx.flat_weights = W.dim() == 2
        return _forward(X, W, m_sizes, gather_indices, router_weights, topk, options, settings.config_forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        call = PLAIN if len(wanted) == 3 else ctx.call
        flat_weights = getattr(ctx, "flat_weights", None)  # a W that was saved is there to be asked
        wanted = (wanted[0], wanted[1], len(wanted) == 5 and wanted[4])
        dX, dW, d_weights = backward(ctx, call, wanted, flat_weights, *gradients)
        return dX, dW, None, None, d_weights  # torch drops None for arguments that were not given


_apply_eagerly: Callable[..., Tensor] = eager_apply(EagerGroupedGemm)
_is_grad_enabled = torch.is_grad_enabled


def eager_product(
    X: Tensor,
    W: Tensor,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    router_weights: Tensor | None,
    call: Call,
) -> Tensor:
    """The product of an eager call, with its gradients where they are wanted."""
    if _is_grad_enabled() and (
        X.requires_grad or W.requires_grad or (router_weights is not None and router_weights.requires_grad)
    ):
        if call is PLAIN:
            return _apply_eagerly(X, W, m_sizes)
        if router_weights is None:  # an argument that is None costs autograd 0.1 us
            return _apply_eagerly(X, W, m_sizes, (gather_indices, call))
        return _apply_eagerly(X, W, m_sizes, (gather_indices, call), router_weights)
    if call is PLAIN:
        return _forward_plain(X, W, m_sizes)
    topk, options, settings = call
    return _forward(X, W, m_sizes, gather_indices, router_weights, topk, options, settings.config_forward)


# Whether autocast is on for any device: 0.17 us instead of 0.29 for the device of a tensor. Dynamo does not know it.
may_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)

# What torch.backends.cuda.matmul.fp32_precision reads: 0.9 us become 0.18.
_read_precision: Callable[[str, str], str] | None = getattr(torch._C, "_get_fp32_precision_getter", None)
# The older setting: 0.10 us. It raises once the newer one says something else, and is None from then on.
_read_older_setting: Callable[[], bool] | None = getattr(torch._C, "_get_cublas_allow_tf32", None)


def cuda_matmul_uses_tf32() -> bool:
    """What the user told torch about fp32 matrix products on CUDA, by whichever of its settings."""
    global _read_older_setting
    if _read_older_setting is not None:
        try:
            return _read_older_setting()
        except RuntimeError:
            _read_older_setting = None
    if _read_precision is not None:
        return _read_precision("cuda", "matmul") == "tf32"
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# What torch.compiler.assume_constant_result does, without importing all of Dynamo for it: the setting is read while
# tracing. Dynamo itself recompiles when it changes.
cuda_matmul_uses_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]
