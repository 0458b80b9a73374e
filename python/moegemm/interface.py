"""The seeds' interface: the differentiable product and its three raw parts.

E experts, T tokens, M = T * topk rows. Flat order: row t * topk + s is slot s of token t. Expert order: the same
rows sorted by expert, expert e owning m_sizes[e] consecutive rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moegemm.autograd import (
    DEFAULTS,
    Settings,
    apply_plain,
    apply_with_tangents,
    apply_with_transforms,
    apply_without_transforms,
    forward_plain_directly,
)
from moegemm.operators import flags as bits
from moegemm.operators.derivatives import refuse_traced_forward_mode
from moegemm.operators.errors import UnderAutocastError, explain, shown
from moegemm.operators.main_grad import main_grad_of
from moegemm.operators.notes import warn_of_replaced_kernels
from moegemm.operators.raw import RawArguments, autocast_dtype, cuda_matmul_uses_tf32, raw_flags, run_raw
from moegemm.operators.rules import require_no_fuse_mul_pre, require_valid_flags, require_valid_role
from moegemm.tuning import (
    DEFAULT_BLOCK,
    DEFAULT_STAGES,
    DEFAULT_WARPS,
    KernelConfig,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
)
from moegemm.tuning.autotune import after_autotune, autotune_flag

_ops: Any = torch.ops.moegemm
_forward: Callable[..., Tensor] = _ops.forward.default

_float32 = torch.float32
_is_tracing = torch.compiler.is_compiling  # torch.export included
_transforms_active = torch._C._are_functorch_transforms_active
_is_autocast_enabled = torch.is_autocast_enabled
# For any device, in a quarter of the time.
_may_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_is_grad_enabled = torch.is_grad_enabled
# Asking takes longer than the other questions together, so that a plain call only does once the dispatcher has come
# across autocast, where forward_plain stops.
_seen_autocast = False
# What cuda_matmul_uses_tf32 asks first, less a Python frame. It raises once torch's newer setting says something else.
_tf32_setting: Callable[[], bool] = getattr(torch._C, "_get_cublas_allow_tf32", cuda_matmul_uses_tf32)


def grouped_gemm(
    X: Tensor,
    W: Tensor,
    m_sizes: Tensor,
    topk: int,
    gather_indices: Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_fwd: KernelConfigForward | None = None,
    kernel_config_bwd_dX: KernelConfigBackward_dX | None = None,
    kernel_config_bwd_dW: KernelConfigBackward_dW | None = None,
    autotune: bool = False,
    is_first_gemm: bool = True,
    dX_only: bool = False,
    dW_only: bool = False,
    *,
    check: bool = False,
    accumulate: bool = False,
    allow_tf32: bool | None = None,
) -> Tensor:
    """Y_e = X_e W_e^T for every expert e in one call, differentiable in X, W and topk_weights.

    Shapes:
        X: [T, K] with permute_x, else [M, K]; bf16, fp16 or fp32. W: [E, N, K] or [E * N, K], same dtype.
        m_sizes: [E]; gather_indices: [M]; int32 or int64. topk_weights: [M] or [T, topk], fp32 or X's dtype.
        Returns [M, N]: expert order, or flat order with permute_y.

    permute_x reads X in flat order (first GEMM of a layer), permute_y stores Y in flat order (second GEMM), and
    fuse_mul_post multiplies row r by topk_weights[gather_indices[r]] before the one rounding.
    dX_only and dW_only skip the other gradients (dW_only also that of topk_weights, which needs dX's product).
    autotune takes the kernels that were fastest when measured, here or in an earlier process. The first call with a new
    problem measures them, for at most two seconds each, forward here and the gradients in backward; see moegemm.tune.
    check validates m_sizes and gather_indices on the device first, which synchronises.
    accumulate adds dW to `W.main_grad`, a fp32 tensor of W's shape, in backward; W.grad is left alone.
    allow_tf32 permits TF32 for fp32 tensors on CUDA; None means torch.backends.cuda.matmul decides.

    >>> import torch, moegemm
    >>> X, W = torch.randn(6, 16), torch.randn(4, 8, 16)
    >>> moegemm.grouped_gemm(X, W, m_sizes=torch.tensor([3, 0, 1, 2]), topk=1).shape
    torch.Size([6, 8])
    """
    global _seen_autocast, _tf32_setting
    try:
        dual = forward_ad._current_level >= 0  # forward_mode_active(), less a call
        transformed = _is_tracing() or dual or _transforms_active()
        # A call that asks for nothing but the product, first: a tiny one spends a tenth of its time in this function.
        if (
            topk == 1
            and is_first_gemm
            and topk_weights is None
            and kernel_config_fwd is None
            and kernel_config_bwd_dX is None
            and kernel_config_bwd_dW is None
            and not (transformed or permute_x or permute_y or fuse_mul_post or autotune or dX_only or dW_only)
            and not (check or accumulate or allow_tf32)
            and not (_seen_autocast and _may_autocast())
        ):
            try:
                may_use_tf32 = X.dtype is _float32 and allow_tf32 is None and _tf32_setting() and X.is_cuda
            except RuntimeError:  # the older setting's last word
                _tf32_setting, may_use_tf32 = cuda_matmul_uses_tf32, True
            if not may_use_tf32:
                if _is_grad_enabled() and (X.requires_grad or W.requires_grad):
                    return apply_plain(X, W, m_sizes)
                return forward_plain_directly(X, W, m_sizes)
        flags = 0
        settings = DEFAULTS
        parameter = W
        if (transformed or _may_autocast()) and _is_autocast_enabled("cuda" if X.is_cuda else "cpu"):
            X, W = _autocast(X), _autocast(W)
        if permute_x or permute_y or fuse_mul_post or not is_first_gemm or dX_only or dW_only:
            require_valid_flags(permute_x, permute_y, fuse_mul_post, gather_indices, topk_weights)
            require_valid_role(permute_x, permute_y, fuse_mul_post, is_first_gemm, dX_only, dW_only)
            flags = (
                (bits.PERMUTE_X if permute_x else 0)
                | (bits.PERMUTE_Y if permute_y else 0)
                | (bits.FUSE_MUL if fuse_mul_post else 0)
            )
        if check:
            flags |= bits.CHECK
        if autotune:
            flags |= autotune_flag()
        if allow_tf32 or (allow_tf32 is None and X.dtype is _float32 and X.is_cuda and cuda_matmul_uses_tf32()):
            flags |= bits.ALLOW_TF32
        if (
            dX_only
            or dW_only
            or accumulate
            or kernel_config_fwd is not None
            or kernel_config_bwd_dX is not None
            or kernel_config_bwd_dW is not None
        ):
            settings = Settings(
                _numbers("kernel_config_fwd", kernel_config_fwd, KernelConfigForward, flags),
                _numbers("kernel_config_bwd_dX", kernel_config_bwd_dX, KernelConfigBackward_dX, flags),
                _numbers("kernel_config_bwd_dW", kernel_config_bwd_dW, KernelConfigBackward_dW, flags),
                dX_only,
                dW_only,
                main_grad_of(parameter) if accumulate else None,
                parameter if accumulate else None,
            )
            if transformed:
                flags |= bits.WARN_AT_ONCE
        if dual:
            refuse_traced_forward_mode("grouped_gemm")
            Y = apply_with_tangents(X, W, m_sizes, gather_indices, topk_weights, (topk, flags, settings))
        elif not (
            _is_grad_enabled()
            and (X.requires_grad or W.requires_grad or (topk_weights is not None and topk_weights.requires_grad))
        ):
            Y = _forward(X, W, m_sizes, gather_indices, topk_weights, topk, flags, settings.config_forward)
        elif transformed:
            Y = apply_with_transforms(X, W, m_sizes, gather_indices, topk_weights, (topk, flags, settings))
        elif topk_weights is None:
            Y = apply_without_transforms(X, W, (m_sizes, gather_indices, (topk, flags, settings)))
        else:
            Y = apply_without_transforms(X, W, (m_sizes, gather_indices, (topk, flags, settings)), topk_weights)
    except UnderAutocastError:  # from a plain call, which has no other arguments; _seen_autocast keeps the next from it
        _seen_autocast = True
        return grouped_gemm(X, W, m_sizes, 1, allow_tf32=allow_tf32)
    except (RuntimeError, AttributeError) as error:
        arguments = RawArguments(X, W, m_sizes, gather_indices, topk_weights, topk)
        raise explain(error, arguments.tensors(), topk) from None
    # In this order: Dynamo in torch 2.10 cannot tell named tuples apart.
    if not transformed and (autotune or settings is not DEFAULTS):
        if settings.config_forward is not None:
            warn_of_replaced_kernels(stacklevel=2)
        if autotune:
            after_autotune(stacklevel=2)
    return Y


def grouped_gemm_forward(
    X: Tensor,
    W: Tensor,
    topk: int,
    m_sizes: Tensor,
    gather_indices: Tensor | None = None,
    topk_weights: Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    fuse_mul_post: bool = False,
    autotune: bool = False,
    BLOCK_SIZE_M: int | None = DEFAULT_BLOCK,
    BLOCK_SIZE_N: int | None = DEFAULT_BLOCK,
    BLOCK_SIZE_K: int | None = DEFAULT_BLOCK,
    num_warps: int | None = DEFAULT_WARPS,
    num_stages: int | None = DEFAULT_STAGES,
    use_tma_load_w: bool = False,
    use_tma_load_x: bool = False,
    use_tma_store: bool = False,
    flatten: bool = True,
    debug: bool = False,
    *,
    check: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """Y_e = X_e W_e^T, without autograd.

    Shapes as in grouped_gemm. Returns Y [M, N]: `out` if given, else a new tensor of `out_dtype` (X's dtype or fp32).
    debug validates the routing as check does. Block sizes, warps and stages of None, or all of them at their defaults,
    leave the kernel to the planner, or with autotune to what was measured.

    >>> import torch, moegemm
    >>> X, W = torch.randn(6, 16), torch.randn(4, 8, 16)
    >>> moegemm.grouped_gemm_forward(X, W, 1, torch.tensor([3, 0, 1, 2])).shape
    torch.Size([6, 8])
    """
    require_valid_flags(permute_x, permute_y, fuse_mul_post, gather_indices, topk_weights)
    config = KernelConfigForward(
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten,
        use_tma_store=use_tma_store, use_tma_load_w=use_tma_load_w, use_tma_load_x=use_tma_load_x,
    )  # fmt: skip
    arguments = RawArguments(X, W, m_sizes, gather_indices, topk_weights, topk)
    flags = raw_flags(X, permute_x, permute_y, fuse_mul_post, check or debug, allow_tf32, autotune)
    return run_raw("forward", arguments, flags, config, out, out_dtype)


def grouped_gemm_dX(
    dY: Tensor,
    W: Tensor,
    gather_indices: Tensor | None,
    m_sizes: Tensor,
    topk: int,
    BLOCK_SIZE_M: int | None = DEFAULT_BLOCK,
    BLOCK_SIZE_N: int | None = DEFAULT_BLOCK,
    BLOCK_SIZE_K: int | None = DEFAULT_BLOCK,
    debug: bool = False,
    permute_x: bool = False,
    permute_y: bool = False,
    use_tma_load_w: bool = False,
    use_tma_load_dy: bool = False,
    use_tma_store: bool = False,
    num_warps: int | None = DEFAULT_WARPS,
    num_stages: int | None = DEFAULT_STAGES,
    flatten: bool = True,
    fuse_mul_pre: bool = False,
    fuse_mul_post: bool = False,
    autotune: bool = False,
    *,
    topk_weights: Tensor | None = None,
    check: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """dX_e = dY_e W_e.

    Shapes:
        dY: [M, N], flat order with permute_y, else expert order. W: [E, N, K] or [E * N, K].
        Returns dX [M, K]: flat order with permute_x (not yet summed over a token's slots), else expert order.

    fuse_mul_post multiplies row r by topk_weights[gather_indices[r]]. fuse_mul_pre is not offered: no product of an
    MoE layer multiplies before its GEMM.

    >>> import torch, moegemm
    >>> dY, W = torch.randn(6, 8), torch.randn(4, 8, 16)
    >>> moegemm.grouped_gemm_dX(dY, W, None, torch.tensor([3, 0, 1, 2]), topk=1).shape
    torch.Size([6, 16])
    """
    require_valid_flags(permute_x, permute_y, fuse_mul_post, gather_indices, topk_weights)
    require_no_fuse_mul_pre(fuse_mul_pre)
    config = KernelConfigBackward_dX(
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten,
        use_tma_store=use_tma_store, use_tma_load_w=use_tma_load_w, use_tma_load_dy=use_tma_load_dy,
    )  # fmt: skip
    arguments = RawArguments(dY, W, m_sizes, gather_indices, topk_weights, topk, ("dY", "W"))
    flags = raw_flags(dY, permute_x, permute_y, fuse_mul_post, check or debug, allow_tf32, autotune)
    return run_raw("dx", arguments, flags, config, out, out_dtype)


def grouped_gemm_dW(
    X: Tensor,
    dY: Tensor,
    m_sizes: Tensor,
    gather_indices: Tensor | None,
    topk: int,
    BLOCK_SIZE_M: int | None = DEFAULT_BLOCK,
    BLOCK_SIZE_N: int | None = DEFAULT_BLOCK,
    BLOCK_SIZE_K: int | None = DEFAULT_BLOCK,
    permute_x: bool = False,
    permute_y: bool = False,
    use_tma_load_dy: bool = False,
    use_tma_load_x: bool = False,
    use_tma_store: bool = False,
    fuse_mul_pre: bool = False,
    fuse_mul_post: bool = False,
    num_warps: int | None = DEFAULT_WARPS,
    num_stages: int | None = DEFAULT_STAGES,
    flatten: bool = True,
    autotune: bool = False,
    debug: bool = False,
    *,
    topk_weights: Tensor | None = None,
    check: bool = False,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    allow_tf32: bool | None = None,
) -> Tensor:
    """dW_e = dY_e^T X_e.

    Shapes:
        X: [T, K] with permute_x, else [M, K]. dY: [M, N], flat order with permute_y, else expert order.
        Returns dW [E, N, K]; an expert without rows gets zeros.

    out_dtype=torch.float32 keeps the full accumulator. accumulate adds to `out`, which must be fp32 (the main_grad of
    training frameworks). fuse_mul_post scales row r's contribution by topk_weights[gather_indices[r]].

    >>> import torch, moegemm
    >>> X, dY = torch.randn(6, 16), torch.randn(6, 8)
    >>> moegemm.grouped_gemm_dW(X, dY, torch.tensor([3, 0, 1, 2]), None, topk=1).shape
    torch.Size([4, 8, 16])
    """
    require_valid_flags(permute_x, permute_y, fuse_mul_post, gather_indices, topk_weights)
    require_no_fuse_mul_pre(fuse_mul_pre)
    if accumulate and out is None:
        raise ValueError("accumulate=True with out=None; out must hold the fp32 tensor to add to")
    config = KernelConfigBackward_dW(
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten,
        use_tma_store=use_tma_store, use_tma_load_dy=use_tma_load_dy, use_tma_load_x=use_tma_load_x,
    )  # fmt: skip
    arguments = RawArguments(dY, X, m_sizes, gather_indices, topk_weights, topk, ("dY", "X"))
    flags = raw_flags(X, permute_x, permute_y, fuse_mul_post, check or debug, allow_tf32, autotune)
    return run_raw("dw", arguments, flags | (bits.ACCUMULATE if accumulate else 0), config, out, out_dtype)


def _autocast(tensor: Tensor) -> Tensor:
    """What autocast does to the operands of torch.mm: floating tensors but float64 take its dtype."""
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    dtype = autocast_dtype(tensor.device)
    return tensor if dtype is None else tensor.to(dtype)


def _numbers(argument: str, config: KernelConfig | None, expected: type[KernelConfig], flags: int) -> list[int] | None:
    if config is None:
        return None
    if not isinstance(config, expected):
        raise TypeError(f"{argument} is {shown(config)}; a {expected.__name__} is accepted")
    config.require_valid(
        argument, bool(flags & bits.PERMUTE_X), bool(flags & bits.PERMUTE_Y), bool(flags & bits.FUSE_MUL)
    )
    numbers = config.numbers()
    return numbers if any(numbers) else None  # one that asks for nothing must not keep autotune from its choice
