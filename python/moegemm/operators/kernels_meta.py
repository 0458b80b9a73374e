"""What torch has to know of the operators besides how to run them: the shapes of their results (for
torch.compile), the gradient of `combine`, and that none of them can be vmapped."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegemm.activations import is_gated
from moegemm.operators import combine_gradient, compact
from moegemm.operators import flags as bits
from moegemm.operators.derivatives import vmap_refusal
from moegemm.operators.rules import require_same_device, require_same_dtype

Config = list[int] | None

# Unlike a plain `if`, this leaves sizes symbolic and only records what must hold.
_check: Callable[..., None] = torch._check


def _dtype(lead: Tensor, flags: int) -> torch.dtype:
    return torch.float32 if flags & bits.FLOAT32_OUTPUT else lead.dtype


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _forward(
    x: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, topk_weights: Tensor | None = None,
    topk: int = 1, flags: int = 0, config: Config = None,
) -> Tensor:  # fmt: skip
    _require(x.dim() == 2, f"X has {x.dim()} dimensions; its shape must be [T, K] or [M, K]")
    _require(w.dim() in (2, 3), f"W has {w.dim()} dimensions; its shape must be [E, N, K] or [E * N, K]")
    require_same_dtype("W", w, "X", x)
    _check(x.size(1) == w.size(-1), lambda: f"X is {list(x.shape)}; K must be that of W, {list(w.shape)}")
    rows = x.size(0)
    if flags & bits.PERMUTE_X:
        assert gather_indices is not None
        rows = gather_indices.size(0)
    n = w.size(1) if w.dim() == 3 else w.size(0) // m_sizes.size(0)
    return x.new_empty((rows, n), dtype=_dtype(x, flags))


def _dx(
    dy: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, topk_weights: Tensor | None = None,
    topk: int = 1, flags: int = 0, config: Config = None,
) -> Tensor:  # fmt: skip
    rows = dy.size(0)
    if flags & bits.DY_PER_TOKEN:
        assert gather_indices is not None
        rows = gather_indices.size(0)
    return dy.new_empty((rows, w.size(-1)), dtype=_dtype(dy, flags))


def _dw(
    dy: Tensor, x: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, topk_weights: Tensor | None = None,
    topk: int = 1, flags: int = 0, config: Config = None,
) -> Tensor:  # fmt: skip
    return dy.new_empty((m_sizes.size(0), dy.size(1), x.size(1)), dtype=_dtype(dy, flags))


def _writes_out(
    first: Tensor, second: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, topk_weights: Tensor | None,
    topk: int, flags: int, config: Config, out: Tensor,
) -> None:  # fmt: skip
    """Nothing to create: the result goes into `out`."""


def _with_epilogue(x: Tensor, w: Tensor, gather_indices: Tensor | None, flags: int, gated: bool) -> Tensor:
    rows = x.size(0)
    if flags & bits.PERMUTE_X:
        assert gather_indices is not None
        rows = gather_indices.size(0)
    columns = w.size(2 if flags & bits.TRANSPOSED else 1)
    return x.new_empty((rows, columns // 2 if gated else columns), dtype=_dtype(x, flags))


def _forward_activated(
    x: Tensor, w: Tensor, bias: Tensor | None, m_sizes: Tensor, gather_indices: Tensor | None, topk: int, flags: int,
    activation: str,
) -> Tensor:  # fmt: skip
    return _with_epilogue(x, w, gather_indices, flags, is_gated(activation))


def _forward_biased(
    x: Tensor, w: Tensor, bias: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, topk_weights: Tensor | None,
    topk: int, flags: int,
) -> Tensor:  # fmt: skip
    return _with_epilogue(x, w, gather_indices, flags, False)


def _route(expert_ids: Tensor, experts: int, wide: bool, with_inverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int64 if wide else torch.int32
    rows = expert_ids.numel()
    return (
        expert_ids.new_empty((experts,), dtype=dtype),
        expert_ids.new_empty((rows,), dtype=dtype),
        expert_ids.new_empty((rows if with_inverse else 0,), dtype=dtype),
    )


def _combine(rows: Tensor, weights: Tensor | None, topk: int, float32_output: bool) -> Tensor:
    _require(topk >= 1, f"topk is {topk}; it must be at least 1")
    shape = (rows.size(0) // topk, rows.size(1))
    return rows.new_empty(shape, dtype=torch.float32 if float32_output else rows.dtype)


def _scale_rows(
    product: Tensor, x: Tensor, m_sizes: Tensor, gather_indices: Tensor, topk_weights: Tensor, topk: int
) -> Tensor:
    return topk_weights.new_empty((product.size(0),))


def _activate(
    pre: Tensor, bias: Tensor | None, m_sizes: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    return pre.new_empty((pre.size(0), pre.size(1) // 2 if is_gated(activation) else pre.size(1)))


def _activate_backward(
    d_act: Tensor, pre: Tensor, bias: Tensor | None, m_sizes: Tensor, gather_indices: Tensor | None,
    topk_weights: Tensor | None, topk: int, d_out: Tensor | None, down_bias: Tensor | None,
    activation: str,
    need_weighted_act: bool, need_d_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slots = pre.size(0) if topk_weights is None else topk_weights.numel()
    return pre.new_empty(pre.shape), pre.new_empty((slots if need_d_weights else 0,), dtype=torch.float32)


def _expert_sums(
    rows: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, topk_weights: Tensor | None, topk: int
) -> Tensor:
    return rows.new_empty((m_sizes.size(0), rows.size(1)))


_FAKES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "forward_plain": _forward,
    "dx": _dx,
    "dw": _dw,
    "forward_activated": _forward_activated,
    "forward_biased": _forward_biased,
    "route": _route,
    "combine": _combine,
    "scale_rows": _scale_rows,
    "activate": _activate,
    "activate_backward": _activate_backward,
    "expert_sums": _expert_sums,
    "forward_out": _writes_out,
    "dx_out": _writes_out,
    "dw_out": _writes_out,
    **compact.FAKES,
}


_CALLERS_NAMES = {"x": "X", "w": "W", "dy": "dY"}


def _on_one_device(fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` for tensors that share a device. With one meta tensor among others torch runs no kernel but this, and its
    result would be memory that nobody wrote."""
    names = list(inspect.signature(fake).parameters)

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        lead_name = names[0]
        for name, value in given.items():
            if isinstance(value, Tensor):
                shown_as, lead_as = _CALLERS_NAMES.get(name, name), _CALLERS_NAMES.get(lead_name, lead_name)
                require_same_device(shown_as, value, lead_as, given[lead_name])
        return fake(*args, **kwargs)

    return checked


def _refusing_vmap(name: str) -> Callable[..., Any]:
    def refuse(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        raise vmap_refusal(f"moegemm::{name}")

    return refuse


_torch_library: Any = torch.library
_ours: Any = _torch_library.Library("moegemm", "IMPL")  # kept: its registrations end with it


def register() -> None:
    """Tells torch all of it; once per process."""
    for name, fake in _FAKES.items():
        _torch_library.register_fake(f"moegemm::{name}", _on_one_device(fake))
        _torch_library.register_vmap(f"moegemm::{name}", _refusing_vmap(name))
    _torch_library.register_autograd(
        "moegemm::combine", combine_gradient.backward, setup_context=combine_gradient.setup_context
    )
    _torch_library.register_autograd("moegemm::combine_rows", compact.backward, setup_context=compact.setup_context)
    # Autograd deals with this one before it is called (shortcuts.py); a stop at torch's fallback takes time.
    _ours.impl("forward_plain", _torch_library.fallthrough_kernel, "Autograd")
