"""The Unsloth-compatible interface: the differentiable product and its three raw parts.

E experts, T tokens, M = T * topk rows. Flat order: row t * topk + s is slot s of token t. Expert order: the same
rows sorted by expert, expert e owning m_sizes[e] consecutive rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moegemm.autograd import function_product
from moegemm.operators.errors import explain, shown
from moegemm.operators.gradients.derivatives import inside_torch_func
from moegemm.operators.gradients.main_grad import main_grad_of
from moegemm.operators.gradients.product import DEFAULTS, PLAIN, Settings
from moegemm.operators.gradients.weight_gradients import WeightGradients, apart, require_queue
from moegemm.operators.options import ACCUMULATE, WARN_AT_ONCE
from moegemm.operators.packed import REFUSED_GRADIENT, Packed
from moegemm.operators.raw import (
    RawArguments,
    autocast_dtype,
    cast_for_autocast,
    raw_options,
    run_raw,
    torch_allows_tf32,
)
from moegemm.operators.rules import require_no_fuse_mul_pre, require_valid_role
from moegemm.operators.segments import ZERO, placed
from moegemm.operators.shortcuts import eager_product, may_autocast
from moegemm.quantized.checking import checked_weight
from moegemm.quantized.weight import QuantizedWeight, refuse_operands
from moegemm.sharded import PLAIN_TENSORS
from moegemm.tuning import (
    DEFAULT_BLOCK,
    DEFAULT_STAGES,
    DEFAULT_WARPS,
    KernelConfig,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
)
from moegemm.tuning.autotune import after_chosen_kernel

_Configs = tuple[KernelConfigForward | None, KernelConfigBackward_dX | None, KernelConfigBackward_dW | None]

# What a call says of its gradients: dX_only, dW_only, accumulate and weight_gradients.
_Asked = tuple[bool, bool, bool, WeightGradients | None]

_is_tracing = torch.compiler.is_compiling  # torch.export included


def grouped_gemm(
    X: Tensor,
    W: Tensor | QuantizedWeight,
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
    weight_gradients: WeightGradients | None = None,
    starts: Tensor | None = None,
    tails: str = ZERO,
    expected_rows: int | None = None,
) -> Tensor:
    """Y_e = X_e W_e^T for every expert e in one call, differentiable in X, W and topk_weights.

    Shapes:
        X: [T, K] with permute_x, else [M, K]; bf16, fp16 or fp32. W: [E, N, K] or [E * N, K], same dtype, or a
        QuantizedWeight [E, N, K], which gets no gradient.
        m_sizes: [E]; gather_indices: [M]; int32 or int64. topk_weights: [M] or [T, topk], fp32 or X's dtype.

    Returns Y [M, N] in expert order. permute_x reads X in flat order (first GEMM of a layer), permute_y stores Y so
    (second GEMM), and fuse_mul_post multiplies row r by topk_weights[gather_indices[r]] before the one rounding.
    dX_only and dW_only skip the other gradients (dW_only also that of topk_weights, which needs dX's product).
    autotune takes the kernels that were fastest when measured, which a first call does: see moegemm.tune.
    check validates m_sizes, gather_indices and the scales of a QuantizedWeight first, which synchronises.
    accumulate adds dW to `W.main_grad`, fp32 or bf16; weight_gradients computes it later: docs/how-to/engines.md.
    allow_tf32 permits TF32 for fp32 tensors on CUDA; None means torch.backends.cuda.matmul decides.
    starts [E], tails and expected_rows say where the experts' rows are, and m_sizes [1, E] are ends, as in experts_mlp.

    >>> import torch, moegemm
    >>> X, W = torch.randn(6, 16), torch.randn(4, 8, 16)
    >>> moegemm.grouped_gemm(X, W, m_sizes=torch.tensor([3, 0, 1, 2]), topk=1).shape
    torch.Size([6, 8])
    """
    weight: Any = W if type(W) in PLAIN_TENSORS else checked_weight("W", W, check)
    call, settings = PLAIN, DEFAULTS
    try:
        transformed = _is_tracing() or forward_ad._current_level >= 0 or inside_torch_func()
        if transformed or may_autocast():
            X, weight = _autocast(X, weight)
        allow_tf32 = X.is_cuda and torch_allows_tf32(X) if allow_tf32 is None else allow_tf32
        by_hand = kernel_config_fwd is not None or kernel_config_bwd_dX is not None or kernel_config_bwd_dW is not None
        has_settings = by_hand or dX_only or dW_only or accumulate or weight_gradients is not None
        if (
            has_settings or permute_x or permute_y or fuse_mul_post or autotune or check or allow_tf32 or topk != 1
            or not is_first_gemm or topk_weights is not None or starts is not None or tails is not ZERO
            or expected_rows is not None
        ):  # fmt: skip
            require_valid_role(permute_x, permute_y, is_first_gemm, dX_only, dW_only)
            m_sizes = placed(m_sizes, starts)
            options = raw_options(
                X, permute_x, permute_y, fuse_mul_post, check, allow_tf32, autotune, tails, expected_rows
            )
            if has_settings:
                configs = (kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW)
                asked = (dX_only, dW_only, accumulate, weight_gradients)
                settings, weight = _settings(configs, asked, options, W, weight)
            call = (topk, options + (WARN_AT_ONCE if transformed and has_settings else ""), settings)
        product = function_product if transformed or type(weight) is Packed else eager_product
        Y = product(X, weight, m_sizes, gather_indices, topk_weights, call)
    except (RuntimeError, AttributeError, ValueError) as error:  # ValueError: an array has no truth value
        arguments = RawArguments(X, weight, m_sizes, gather_indices, topk_weights, topk)
        raise explain(error, arguments.tensors(), topk) from None
    if (by_hand or autotune) and not transformed:
        after_chosen_kernel(stacklevel=2)
    return Y


def grouped_gemm_forward(
    X: Tensor,
    W: Tensor | QuantizedWeight,
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
    starts: Tensor | None = None,
    tails: str = ZERO,
    expected_rows: int | None = None,
) -> Tensor:
    """Y_e = X_e W_e^T, without autograd.

    Shapes as in grouped_gemm. Returns Y [M, N]: `out` if given, else a new tensor of `out_dtype` (X's dtype or fp32).
    Where gather_indices are a capacity permute_y needs `out` [T * topk, N], which says how many flat rows there are.
    debug validates the routing as check does. Block sizes, warps and stages of None, or all of them at their defaults,
    leave the kernel to the planner, or with autotune to what was measured.

    >>> import torch, moegemm
    >>> X, W = torch.randn(6, 16), torch.randn(4, 8, 16)
    >>> moegemm.grouped_gemm_forward(X, W, 1, torch.tensor([3, 0, 1, 2])).shape
    torch.Size([6, 8])
    """
    config = KernelConfigForward(
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten,
        use_tma_store=use_tma_store, use_tma_load_w=use_tma_load_w, use_tma_load_x=use_tma_load_x,
    )  # fmt: skip
    weight = checked_weight("W", W, check or debug)
    arguments = RawArguments(X, weight, placed(m_sizes, starts), gather_indices, topk_weights, topk)
    options = raw_options(
        X, permute_x, permute_y, fuse_mul_post, check or debug, allow_tf32, autotune, tails, expected_rows
    )
    return run_raw("forward", arguments, options, config, out, out_dtype)


def grouped_gemm_dX(
    dY: Tensor,
    W: Tensor | QuantizedWeight,
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
    starts: Tensor | None = None,
    tails: str = ZERO,
    expected_rows: int | None = None,
) -> Tensor:
    """dX_e = dY_e W_e.

    Shapes:
        dY: [M, N], flat order with permute_y, else expert order. W: [E, N, K] or [E * N, K].
        Returns dX [M, K]: flat order with permute_x (not yet summed over a token's slots), else expert order. Where
        gather_indices are a capacity permute_x needs `out` [T * topk, K], which says how many flat rows there are.

    fuse_mul_post multiplies row r by topk_weights[gather_indices[r]]. fuse_mul_pre is not offered: no product of an
    MoE layer multiplies before its GEMM.

    >>> import torch, moegemm
    >>> dY, W = torch.randn(6, 8), torch.randn(4, 8, 16)
    >>> moegemm.grouped_gemm_dX(dY, W, None, torch.tensor([3, 0, 1, 2]), topk=1).shape
    torch.Size([6, 16])
    """
    require_no_fuse_mul_pre(fuse_mul_pre)
    config = KernelConfigBackward_dX(
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten,
        use_tma_store=use_tma_store, use_tma_load_w=use_tma_load_w, use_tma_load_dy=use_tma_load_dy,
    )  # fmt: skip
    weight = checked_weight("W", W, check or debug)
    arguments = RawArguments(dY, weight, placed(m_sizes, starts), gather_indices, topk_weights, topk, ("dY", "W"))
    options = raw_options(
        dY, permute_x, permute_y, fuse_mul_post, check or debug, allow_tf32, autotune, tails, expected_rows
    )
    return run_raw("dx", arguments, options, config, out, out_dtype)


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
    starts: Tensor | None = None,
    tails: str = ZERO,
    expected_rows: int | None = None,
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
    require_no_fuse_mul_pre(fuse_mul_pre)
    config = KernelConfigBackward_dW(
        BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, flatten,
        use_tma_store=use_tma_store, use_tma_load_dy=use_tma_load_dy, use_tma_load_x=use_tma_load_x,
    )  # fmt: skip
    refuse_operands(X=X, dY=dY)
    arguments = RawArguments(dY, X, placed(m_sizes, starts), gather_indices, topk_weights, topk, ("dY", "X"))
    options = raw_options(
        X, permute_x, permute_y, fuse_mul_post, check or debug, allow_tf32, autotune, tails, expected_rows
    )
    return run_raw("dw", arguments, options + (ACCUMULATE if accumulate else ""), config, out, out_dtype)


def _autocast(X: Tensor, W: Any) -> tuple[Tensor, Any]:
    dtype = autocast_dtype(X.device)
    if dtype is None:
        return X, W
    return cast_for_autocast(X, dtype), W if type(W) is Packed else cast_for_autocast(W, dtype)


def _settings(configs: _Configs, asked: _Asked, options: str, given: Any, W: Any) -> tuple[Settings, Any]:
    """What a call asks for beyond options, and the W that its product reads; `given` is that of the caller."""
    dX_only, dW_only, accumulate, later = asked
    if type(W) is Packed:
        for name, value in {"dW_only": dW_only, "accumulate": accumulate, "weight_gradients": later}.items():
            if value is not None and value is not False:
                raise TypeError(f"{name} is {value} with W in {W.word}; {REFUSED_GRADIENT}")
    require_queue(later)
    adds = accumulate and not dX_only and torch.is_grad_enabled() and given.requires_grad
    settings = Settings(
        _numbers("kernel_config_fwd", configs[0], KernelConfigForward, options),
        _numbers("kernel_config_bwd_dX", configs[1], KernelConfigBackward_dX, options),
        _numbers("kernel_config_bwd_dW", configs[2], KernelConfigBackward_dW, options),
        dX_only,
        dW_only,
        main_grad_of(given) if adds else None,
        later,
        None if later is None else W,
    )
    return settings, W if later is None else apart(W)


def _numbers(
    argument: str, config: KernelConfig | None, expected: type[KernelConfig], options: str
) -> list[int] | None:
    if config is None:
        return None
    if not isinstance(config, expected):
        raise TypeError(f"{argument} is {shown(config)}; a {expected.__name__} is accepted")
    return config.numbers(argument, options)
