"""The gradient of a grouped product with respect to X, W and topk_weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.operators import flags as bits
from moegemm.operators.derivatives import once_only, primal_of, refuse_tangents_in_backward, vmap_refusal
from moegemm.operators.errors import explain
from moegemm.operators.main_grad import gradient_after_adding
from moegemm.operators.notes import warn_of_replaced_kernels
from moegemm.operators.writes import count_write
from moegemm.tuning.autotune import after_autotune

_ops: Any = torch.ops.moegemm
_forward: Callable[..., Tensor] = _ops.forward.default
_forward_plain: Callable[..., Tensor] = _ops.forward_plain.default
# What they call in turn, less a Python frame; Dynamo only knows the former.
_forward_directly: Callable[..., Tensor] = getattr(_forward, "_op", _forward)
forward_plain_directly: Callable[..., Tensor] = getattr(_forward_plain, "_op", _forward_plain)
_dx: Callable[..., Tensor] = _ops.dx.default
_dw: Callable[..., Tensor] = _ops.dw.default
_dw_out: Callable[..., None] = _ops.dw_out.default
_combine: Callable[..., Tensor] = _ops.combine.default
_scale_rows: Callable[..., Tensor] = _ops.scale_rows.default

_FORWARD_ONLY = bits.CHECK  # the same routing is not validated again in backward


class Settings(NamedTuple):
    """What a call asks for beyond the defaults."""

    config_forward: list[int] | None = None
    config_dx: list[int] | None = None
    config_dw: list[int] | None = None
    dx_only: bool = False
    dw_only: bool = False
    main_grad: Tensor | None = None  # [E, N, K] or flattened, fp32: dW is added here
    parameter: Tensor | None = None  # the W that main_grad belongs to


DEFAULTS = Settings()


# topk, flags and settings of one call. They travel as one argument: autograd spends time on each.
Call = tuple[int, int, Settings]


def _needs(wanted: tuple[bool, bool, bool], call: Call) -> tuple[bool, bool, bool]:
    """Whether to compute dX, dW and the gradient of topk_weights, from those that autograd wants."""
    _, flags, settings = call
    if settings.dw_only:
        return False, wanted[1], False
    return wanted[0], wanted[1] and not settings.dx_only, wanted[2] and bool(flags & bits.FUSE_MUL)


class GroupedGemm(torch.autograd.Function):
    """The product with its gradients; `grouped_gemm` is the checked way in.

    Arguments of `apply`: X, W, m_sizes, gather_indices, topk_weights and the tuple (topk, flags, settings), with bits
    of moegemm.operators.flags and a Settings. Nothing but those tensors is saved, and each only if a wanted gradient
    reads it.

    >>> import torch, moegemm
    >>> X, W = torch.ones(3, 4), torch.ones(2, 5, 4, requires_grad=True)        # [M, K], [E, N, K]
    >>> m_sizes = torch.tensor([1, 2])
    >>> moegemm.GroupedGemm.apply(X, W, m_sizes, None, None, (1, 0, moegemm.autograd.DEFAULTS)).sum().backward()
    >>> W.grad[:, 0, 0]
    tensor([1., 2.])
    """

    @staticmethod
    def forward(
        X: Tensor,
        W: Tensor,
        m_sizes: Tensor,
        gather_indices: Tensor | None,
        topk_weights: Tensor | None,
        call: Call,
    ) -> Tensor:
        topk, flags, settings = call
        return _forward(X, W, m_sizes, gather_indices, topk_weights, topk, flags, settings.config_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        X, W, m_sizes, gather_indices, topk_weights, call = inputs
        wanted = ctx.needs_input_grad
        need_x, need_w, need_weights = _needs((wanted[0], wanted[1], wanted[4]), call)
        ctx.save_for_backward(
            X if need_w or need_weights else None,
            W if need_x or need_weights else None,
            m_sizes,
            gather_indices,
            topk_weights,
        )
        ctx.call = call
        ctx.flat_weights = W.dim() == 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        dX, dW, d_weights = _backward(ctx, ctx.call, (wanted[0], wanted[1], wanted[4]), ctx.flat_weights, *gradients)
        return dX, dW, None, None, d_weights, None

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
            return (None,) * 6
        return GroupedGemm.backward(ctx, dY.to(ctx.dtype))  # that of a term of a sum is fp32

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Y is linear in X, in W and in topk_weights: one product for each that has a tangent, summed in fp32."""
        X, W, m_sizes, gather_indices, topk_weights = ctx.saved_tensors
        X, W = primal_of(X), primal_of(W)
        if topk_weights is not None:
            topk_weights = primal_of(topk_weights)
        topk, flags, settings = ctx.call
        flags &= ~(_FORWARD_ONLY | bits.AUTOTUNE)
        dX, dW, d_weights = tangents[0], tangents[1], tangents[4] if flags & bits.FUSE_MUL else None
        changed = []
        if dX is not None:
            changed.append((dX, W, topk_weights))
        if dW is not None:
            changed.append((X, dW, topk_weights))
        if d_weights is not None:
            changed.append((X, W, d_weights))
        if len(changed) > 1:
            flags |= bits.FLOAT32_OUTPUT
        call = topk, flags, Settings(settings.config_forward)
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


def _backward(
    ctx: Any, call: Call, wanted: tuple[bool, bool, bool], flat_weights: bool | None, dY: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of X, W and topk_weights as autograd gets them. `flat_weights`: W is [E * N, K]; None asks the one
    that was saved."""
    topk, flags, settings = call
    flags &= ~_FORWARD_ONLY
    call = (topk, flags, settings)
    saved = ctx.saved_tensors  # once only: checkpointing does not hand it out again
    refuse_tangents_in_backward("grouped_gemm", dY, *saved)
    if flat_weights is None:
        flat_weights = saved[1].dim() == 2
    try:
        with torch.no_grad():
            dX, dW, d_weights = _gradients(_needs(wanted, call), call, dY, *saved)
            if dW is not None and flat_weights:
                dW = dW.flatten(0, -2)
    except RuntimeError as error:
        raise explain(error, {}) from None
    manual = settings.config_dx is not None or settings.config_dw is not None
    if manual and not flags & bits.WARN_AT_ONCE:
        warn_of_replaced_kernels(stacklevel=1)
    if flags & bits.AUTOTUNE and not torch.compiler.is_compiling():
        after_autotune(stacklevel=1)
    dX, dW, d_weights = once_only("grouped_gemm", (dX, dW, d_weights), (dY, *saved))
    return dX, dW, d_weights


def _gradients(
    needs: tuple[bool, bool, bool],
    call: Call,
    dY: Tensor,
    X: Tensor | None,
    W: Tensor | None,
    m_sizes: Tensor,
    gather_indices: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dW and the gradient of topk_weights, each if needed."""
    need_x, need_w, need_weights = needs
    topk, flags, settings = call
    dX = dW = d_weights = None
    if need_weights:
        assert topk_weights is not None
        # The unscaled product serves both: its dot with X is d topk_weights, scaled it is dX.
        product = _dx(dY, W, m_sizes, gather_indices, None, topk, flags & ~bits.FUSE_MUL, settings.config_dx)
        dots = _scale_rows(product, X, m_sizes, gather_indices, topk_weights, topk)
        d_weights = dots.view(topk_weights.shape)
        dX = product if need_x else None
    elif need_x:
        dX = _dx(dY, W, m_sizes, gather_indices, topk_weights, topk, flags, settings.config_dx)
        if flags & bits.PERMUTE_X and topk > 1:
            dX = _combine(dX, None, topk, False)
    if need_w and settings.main_grad is not None:
        dW = _accumulate(settings, dY, X, m_sizes, gather_indices, topk_weights, topk, flags)
    elif need_w:
        dW = _dw(dY, X, m_sizes, gather_indices, topk_weights, topk, flags, settings.config_dw)
    return dX, dW, d_weights


def _accumulate(
    settings: Settings,
    dY: Tensor,
    X: Tensor | None,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    topk_weights: Tensor | None,
    topk: int,
    flags: int,
) -> Tensor | None:
    """Adds dW to main_grad."""
    assert settings.main_grad is not None
    _dw_out(
        dY, X, m_sizes, gather_indices, topk_weights, topk, flags | bits.ACCUMULATE, settings.config_dw,
        settings.main_grad,
    )  # fmt: skip
    count_write(settings.main_grad)
    parameter = settings.parameter
    return None if parameter is None else gradient_after_adding(parameter, parameter.shape)


# m_sizes, gather_indices and the rest: what EagerGroupedGemm.apply takes besides tensors with a gradient.
EagerCall = tuple[Tensor, Tensor | None, Call]


class EagerGroupedGemm(torch.autograd.Function):
    """GroupedGemm for calls that no transform looks at: the same gradients, a tenth less time for a tiny call.

    Transforms need a separate setup_context and every tensor as an argument of its own; autograd spends time on both,
    also on an argument that is None.
    """

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, call: EagerCall, topk_weights: Tensor | None = None) -> Tensor:
        m_sizes, gather_indices, rest = call
        topk, flags, settings = rest
        ctx.call = rest
        if W.dim() == 2:
            ctx.flat_weights = True
        wanted = ctx.needs_input_grad
        need_x, need_w, need_weights = wanted[0], wanted[1], False
        if settings is not DEFAULTS or topk_weights is not None:
            need_x, need_w, need_weights = _needs((need_x, need_w, topk_weights is not None and wanted[3]), rest)
        saved_x = X if need_w or need_weights else None
        saved_w = W if need_x or need_weights else None
        if gather_indices is None and topk_weights is None:
            ctx.save_for_backward(saved_x, saved_w, m_sizes)
        else:
            ctx.save_for_backward(saved_x, saved_w, m_sizes, gather_indices, topk_weights)
        if settings is DEFAULTS:
            return _forward_directly(X, W, m_sizes, gather_indices, topk_weights, topk, flags)
        return _forward(X, W, m_sizes, gather_indices, topk_weights, topk, flags, settings.config_forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad
        weighted = len(wanted) == 4
        flat_weights = getattr(ctx, "flat_weights", False)
        wanted = (wanted[0], wanted[1], weighted and wanted[3])
        dX, dW, d_weights = _backward(ctx, ctx.call, wanted, flat_weights, *gradients)
        return (dX, dW, None, d_weights) if weighted else (dX, dW, None)


_PLAIN: Call = (1, 0, DEFAULTS)


class PlainGroupedGemm(torch.autograd.Function):
    """EagerGroupedGemm for a call that is X, W, m_sizes and defaults: a twentieth less time for a tiny one.

    Autograd looks longer at an argument that is no tensor than at one that is, and a context without attributes of its
    own needs no dictionary.
    """

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, m_sizes: Tensor) -> Tensor:
        need_x, need_w, _ = ctx.needs_input_grad
        if need_x:
            ctx.save_for_backward(X if need_w else None, W, m_sizes)
        else:
            ctx.save_for_backward(X, None, m_sizes)
            ctx.flat_weights = W.dim() == 2  # otherwise W is there to be asked
        return forward_plain_directly(X, W, m_sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        need_x, need_w, _ = ctx.needs_input_grad
        flat_weights = None if need_x else ctx.flat_weights
        dX, dW, _ = _backward(ctx, _PLAIN, (need_x, need_w, False), flat_weights, *gradients)
        return dX, dW, None


# Function.apply spends as long on functorch's wrappers and argument binding as the rest of a tiny call takes. The
# apply below it does the same when no transform is active.
apply_with_transforms: Callable[..., Tensor] = GroupedGemm.apply
apply_with_tangents: Callable[..., Tensor] = DualGroupedGemm.apply
apply_without_transforms: Callable[..., Tensor] = super(torch.autograd.Function, EagerGroupedGemm).apply
apply_plain: Callable[..., Tensor] = super(torch.autograd.Function, PlainGroupedGemm).apply
