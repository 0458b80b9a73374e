"""What torch has to know of the operators besides how to run them: the shapes of their results (for
torch.compile), the gradient of `combine`, and that none of them can be vmapped."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegemm._ops import NAMESPACE, add_op_namespace_prefix
from moegemm.activations import is_gated
from moegemm.operators.gradients import combine as combine_gradient
from moegemm.operators.gradients.derivatives import vmap_refusal
from moegemm.operators.loading import ops
from moegemm.operators.options import DY_PER_TOKEN, FLOAT32_OUTPUT, PERMUTE_X, PERMUTE_Y, TRANSPOSED
from moegemm.operators.packed import packed_shape
from moegemm.operators.registered import compact, factors
from moegemm.operators.rules import require_same_device, require_same_dtype

Config = list[int] | None

# Unlike a plain `if`, this leaves sizes symbolic and only records what must hold.
_check: Callable[..., None] = torch._check


def _dtype(lead: Tensor, options: str) -> torch.dtype:
    return torch.float32 if FLOAT32_OUTPUT in options else lead.dtype


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _rows(first: Tensor, gather_indices: Tensor | None, options: str, per_token: str) -> int:
    """M. Where the first operand has one row per token, with the word `per_token`, the indices count: T * topk of
    them, or a capacity."""
    for word in (PERMUTE_X, PERMUTE_Y):
        if word in options and gather_indices is None:
            raise ValueError(f"gather_indices is None;{word}=True needs it")
    if per_token not in options or gather_indices is None:
        return first.size(0)
    return gather_indices.size(0)


def _forward(
    x: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, router_weights: Tensor | None = None,
    topk: int = 1, options: str = "", config: Config = None, bias: Tensor | None = None, activation: str = "",
    w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    _require(x.dim() == 2, f"X has {x.dim()} dimensions; its shape must be [T, K] or [M, K]")
    if w_format:
        _, n, k = packed_shape(w, w_scales, w_format)
    else:
        _require(w.dim() in (2, 3), f"W has {w.dim()} dimensions; its shape must be [E, N, K] or [E * N, K]")
        require_same_dtype("W", w, "X", x)
        rows_of_w = w.size(1) if w.dim() == 3 else w.size(0) // m_sizes.size(-1)
        n, k = (w.size(-1), rows_of_w) if TRANSPOSED in options else (rows_of_w, w.size(-1))
    _check(x.size(1) == k, lambda: f"X is {list(x.shape)}; its last dimension must be K as in W, {list(w.shape)}")
    rows = _rows(x, gather_indices, options, PERMUTE_X)
    return x.new_empty((rows, n // 2 if activation and is_gated(activation) else n), dtype=_dtype(x, options))


def _dx(
    dy: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, router_weights: Tensor | None = None,
    topk: int = 1, options: str = "", config: Config = None, w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    if w_format:
        k = packed_shape(w, w_scales, w_format)[2]
    else:
        rows_of_w = w.size(1) if w.dim() == 3 else w.size(0) // m_sizes.size(-1)
        k = rows_of_w if TRANSPOSED in options else w.size(-1)
    rows = _rows(dy, gather_indices, options, DY_PER_TOKEN)
    return dy.new_empty((rows, k), dtype=_dtype(dy, options))


def _forward_low_rank(
    x: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, low_rank_rows: Tensor,
    low_rank_weights: Tensor, topk: int = 1, options: str = "", bias: Tensor | None = None, activation: str = "",
    w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    require_same_dtype("low_rank_rows", low_rank_rows, "X", x)
    require_same_dtype("low_rank_weights", low_rank_weights, "X", x)
    return _forward(x, w, m_sizes, gather_indices, None, topk, options, None, bias, activation, w_scales, w_format)


def _forward_pair(
    x: Tensor, w: Tensor, w_up: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, topk: int = 1,
    options: str = "", bias: Tensor | None = None, activation: str = "",
) -> Tensor:  # fmt: skip
    require_same_dtype("w_up", w_up, "X", x)
    half = _forward(x, w, m_sizes, gather_indices, None, topk, options)
    return half if activation else half.new_empty((half.size(0), 2 * half.size(1)))


def _dx_low_rank(
    dy: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, low_rank_rows: Tensor,
    low_rank_weights: Tensor, topk: int = 1, options: str = "", bias: Tensor | None = None, activation: str = "",
    w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    require_same_dtype("low_rank_rows", low_rank_rows, "dY", dy)
    require_same_dtype("low_rank_weights", low_rank_weights, "dY", dy)
    product = _dx(dy, w, m_sizes, gather_indices, None, topk, options, None, w_scales, w_format)
    gated = activation and is_gated(activation)
    return product.new_empty((product.size(0), product.size(1) // 2)) if gated else product


def _dw(
    dy: Tensor, x: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, router_weights: Tensor | None = None,
    topk: int = 1, options: str = "", config: Config = None,
) -> Tensor:  # fmt: skip
    n, k = dy.size(1), x.size(1)
    shape = (m_sizes.size(-1), k, n) if TRANSPOSED in options else (m_sizes.size(-1), n, k)
    return dy.new_empty(shape, dtype=_dtype(dy, options))


def _route(expert_ids: Tensor, num_experts: int, wide: bool, with_inverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int64 if wide else torch.int32
    rows = expert_ids.numel()
    return (
        expert_ids.new_empty((num_experts,), dtype=dtype),
        expert_ids.new_empty((rows,), dtype=dtype),
        expert_ids.new_empty((rows if with_inverse else 0,), dtype=dtype),
    )


def _combine(rows: Tensor, weights: Tensor | None, topk: int, float32_output: bool) -> Tensor:
    _require(topk >= 1, f"topk is {topk}; it must be at least 1")
    shape = (rows.size(0) // topk, rows.size(1))
    return rows.new_empty(shape, dtype=torch.float32 if float32_output else rows.dtype)


def _scale_rows(
    product: Tensor, x: Tensor, m_sizes: Tensor, gather_indices: Tensor, router_weights: Tensor, topk: int
) -> Tensor:
    return router_weights.new_empty((product.size(0),))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Of operators that only write a tensor which is there."""


def _check_experts(lead_name: str) -> Callable[..., None]:
    """Packed values have a dtype of their own. Shapes, which may be symbolic, are left to the products."""

    def check(
        lead: Tensor, w_gate_up: Tensor, w_down: Tensor, segments: Tensor, weights: Tensor | None,
        gate_up_bias: Tensor | None, down_bias: Tensor | None, activation: str, transposed: bool,
        w_up: Tensor | None = None, gate_up_format: str = "", down_format: str = "",
    ) -> None:  # fmt: skip
        plain = {} if down_format else {"w_down": w_down}
        if not gate_up_format:
            plain = {"w_gate_up" if w_up is None else "w_gate_up[0]": w_gate_up, **plain}
            if w_up is not None:
                plain["w_gate_up[1]"] = w_up
        for name, tensor in plain.items():
            require_same_dtype(name, tensor, lead_name, lead)

    return check


def _activate(
    pre: Tensor, bias: Tensor | None, m_sizes: Tensor, activation: str, row_weights: Tensor | None = None,
    options: str = "",
) -> Tensor:  # fmt: skip
    return pre.new_empty((pre.size(0), pre.size(1) // 2 if is_gated(activation) else pre.size(1)))


def _activate_backward(
    d_act: Tensor, pre: Tensor, bias: Tensor | None, m_sizes: Tensor, gather_indices: Tensor | None,
    router_weights: Tensor | None, topk: int, d_out: Tensor | None, down_bias: Tensor | None, activation: str,
    need_weighted_act: bool, need_d_weights: bool, options: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slots = pre.size(0) if router_weights is None else router_weights.numel()
    return pre.new_empty(pre.shape), pre.new_empty((slots if need_d_weights else 0,), dtype=torch.float32)


def _expert_sums(
    rows: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, router_weights: Tensor | None, topk: int
) -> Tensor:
    return rows.new_empty((m_sizes.size(-1), rows.size(1)))


def _dequantize(w: Tensor, scales: Tensor, w_format: str, dtype: torch.dtype) -> Tensor:
    return w.new_empty(packed_shape(w, scales, w_format), dtype=dtype)


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "forward_plain": _forward,
    "forward_low_rank": _forward_low_rank,
    "forward_pair": _forward_pair,
    "dx": _dx,
    "dx_low_rank": _dx_low_rank,
    "dw": _dw,
    "route": _route,
    "combine": _combine,
    "scale_rows": _scale_rows,
    "combine_out": _nothing,
    "check_layer": _check_experts("x"),
    "check_expert_rows": _check_experts("rows"),
    "add_weighted_bias": _nothing,
    "add_rows": _nothing,
    "activate": _activate,
    "activate_backward": _activate_backward,
    "expert_sums": _expert_sums,
    "forward_out": _nothing,
    "dx_out": _nothing,
    "dequantize": _dequantize,
    "dw_out": _nothing,
    "combine_rows_out": _nothing,
    **compact.FAKES,
    **factors.FAKES,
}


_CALLERS_NAMES = {"x": "X", "w": "W", "dy": "dY", "router_weights": "topk_weights"}


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's `fake` for tensors that share a device. With one meta tensor among others torch runs no kernel but
    this, and its result would be memory that nobody wrote."""
    names = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    callers_names = {"w_up": "w_gate_up[1]"} if name.startswith("check_") else _CALLERS_NAMES

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        lead_name = next((name for name, value in given.items() if isinstance(value, Tensor)), names[0])
        for name, value in given.items():
            if isinstance(value, Tensor):
                shown_as, lead_as = callers_names.get(name, name), callers_names.get(lead_name, lead_name)
                require_same_device(shown_as, value, lead_as, given[lead_name])
        return fake(*args, **kwargs)

    return checked


def _refusing_vmap(name: str) -> Callable[..., Any]:
    def refuse(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        raise vmap_refusal(add_op_namespace_prefix(name))

    return refuse


_torch_library: Any = torch.library
_ours: Any = _torch_library.Library(NAMESPACE, "IMPL")  # kept: its registrations end with it


def register() -> None:
    """Tells torch all of it; once per process."""
    for name, fake in _FAKES.items():
        _torch_library.register_fake(add_op_namespace_prefix(name), _on_one_device(name, fake))
        _torch_library.register_vmap(add_op_namespace_prefix(name), _refusing_vmap(name))
    _torch_library.register_autograd(
        add_op_namespace_prefix("combine"), combine_gradient.backward, setup_context=combine_gradient.setup_context
    )
    _torch_library.register_autograd(
        add_op_namespace_prefix("combine_rows"), compact.backward, setup_context=compact.setup_context
    )
    # Autograd deals with this one before it is called (shortcuts.py); a stop at torch's fallback takes time.
    _ours.impl("forward_plain", _torch_library.fallthrough_kernel, "Autograd")
