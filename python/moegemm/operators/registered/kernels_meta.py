"""What torch has to know of the operators besides how to run them: the shapes of their results (for
torch.compile), the gradient of `combine`, counts of operations, and that none of them can be vmapped."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from moegemm._ops import NAMESPACE, add_op_namespace_prefix
from moegemm.activations import is_gated
from moegemm.operators.gradients import combine as combine_gradient
from moegemm.operators.gradients.derivatives import vmap_refusal
from moegemm.operators.loading import ops
from moegemm.operators.packed import packed_shape
from moegemm.operators.registered import compact, factors
from moegemm.operators.registered.products import PRODUCTS, nothing
from moegemm.operators.rules import require_same_device


def _route(expert_ids: Tensor, num_experts: int, wide: bool, with_inverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int64 if wide else torch.int32
    rows = expert_ids.numel()
    return (
        expert_ids.new_empty((num_experts,), dtype=dtype),
        expert_ids.new_empty((rows,), dtype=dtype),
        expert_ids.new_empty((rows if with_inverse else 0,), dtype=dtype),
    )


def _combine(rows: Tensor, weights: Tensor | None, topk: int, float32_output: bool) -> Tensor:
    shape = (rows.size(0) // topk, rows.size(1))
    return rows.new_empty(shape, dtype=torch.float32 if float32_output else rows.dtype)


def _scale_rows(
    product: Tensor, x: Tensor, m_sizes: Tensor, gather_indices: Tensor, router_weights: Tensor, topk: int
) -> Tensor:
    return router_weights.new_empty((product.size(0),))


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
    return w.new_empty(packed_shape(w, w_format), dtype=dtype)


_FAKES: dict[str, Callable[..., Any]] = {
    "route": _route,
    "combine": _combine,
    "scale_rows": _scale_rows,
    "combine_out": nothing,
    "check_layer": nothing,
    "check_expert_rows": nothing,
    "add_weighted_bias": nothing,
    "add_rows": nothing,
    "activate": _activate,
    "activate_backward": _activate_backward,
    "expert_sums": _expert_sums,
    "dequantize": _dequantize,
    "combine_rows_out": nothing,
    **{name: product.fake for name, product in PRODUCTS.items()},
    **compact.FAKES,
    **factors.FAKES,
}


_CALLERS_NAMES = {"x": "X", "w": "W", "dy": "dY", "router_weights": "topk_weights"}


# The kernels of the CPU are also those of tensors on meta: there they check their arguments, and do nothing.
_RULES: Any = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class _UnknownSizeError(Exception):
    """Tracing knows a size by its symbol only."""


def _size(value: Any) -> Any:
    """One that tracing knows by a symbol as it is in the call that is traced."""
    if not isinstance(value, torch.SymInt):
        return value
    hint = getattr(value.node, "hint", None)
    if not isinstance(hint, int):
        raise _UnknownSizeError
    return hint


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return _size(value)
    sizes, strides = (tuple(map(_size, numbers)) for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _follow_rules(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises what the operator would raise for tensors with memory, as far as it can be known."""
    with no_dispatch():  # of the mode that has the fake tensors
        try:
            args, kwargs = tree_map(_on_meta, (args, kwargs))
        except _UnknownSizeError:
            return
        operator.redispatch(_RULES, *args, **kwargs)


def _with_rules(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's `fake` for arguments that the operator would take, and that share a device: with one meta tensor
    among others torch runs no kernel but this, and its result would be memory that nobody wrote."""
    operator = getattr(ops, name).default
    names = [argument.name for argument in operator._schema.arguments]
    callers_names = {"w_up": "w_gate_up[1]"} if name.startswith("check_") else _CALLERS_NAMES

    @functools.wraps(fake)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        lead_name = next((name for name, value in given.items() if isinstance(value, Tensor)), names[0])
        for name, value in given.items():
            if isinstance(value, Tensor):
                shown_as, lead_as = callers_names.get(name, name), callers_names.get(lead_name, lead_name)
                require_same_device(shown_as, value, lead_as, given[lead_name])
        _follow_rules(operator, args, kwargs)
        return fake(*args, **kwargs)

    return checked


_CHECKED_BY = {"check_layer": "an expert layer", "check_expert_rows": "experts_mlp"}  # the first operators of a layer


def _refusing_vmap(name: str) -> Callable[..., Any]:
    def refuse(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        raise vmap_refusal(_CHECKED_BY.get(name) or add_op_namespace_prefix(name))

    return refuse


_torch_library: Any = torch.library
_ours: Any = _torch_library.Library(NAMESPACE, "IMPL")  # kept: its registrations end with it


def register() -> None:
    """Tells torch all of it; once per process."""
    for name, fake in _FAKES.items():
        _torch_library.register_fake(add_op_namespace_prefix(name), _with_rules(name, fake))
        _torch_library.register_vmap(add_op_namespace_prefix(name), _refusing_vmap(name))
    for name, product in PRODUCTS.items():
        teach: Callable[[Callable[..., int]], object] = register_flop_formula(getattr(ops, name))
        teach(product.flops)
    _torch_library.register_autograd(
        add_op_namespace_prefix("combine"), combine_gradient.backward, setup_context=combine_gradient.setup_context
    )
    _torch_library.register_autograd(
        add_op_namespace_prefix("combine_rows"), compact.backward, setup_context=compact.setup_context
    )
    # Autograd deals with this one before it is called (shortcuts.py); a stop at torch's fallback takes time.
    _ours.impl("forward_plain", _torch_library.fallthrough_kernel, "Autograd")
