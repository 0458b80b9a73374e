"""What torch has to know of the operators that multiply: the shapes of their results, counts of operations, and which
results activation checkpointing may keep.

What torch.utils.flop_counter counts is 2 M N K, whatever the rows' experts. M is the number of routed rows. m_sizes
stays on the device. So rows without an expert count like any other, and the count is the most that a call may compute.
Passes (route, combine, activations) count nothing, like torch's own element-wise operators.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import is_gated
from moegemm.operators.options import DY_PER_TOKEN, FLOAT32_OUTPUT, PERMUTE_X, TRANSPOSED
from moegemm.operators.packed import VALUES_PER_ELEMENT, format_of, packed_shape

Config = list[int] | None
Shape = tuple[int, ...]

# For sizes that tracing knows by symbols only: unlike a plain `if`, this records what must hold.
_check: Callable[..., None] = torch._check


class Product(NamedTuple):
    """One operator that multiplies."""

    fake: Callable[..., Any]
    flops: Callable[..., int]
    kept: bool = False  # a result that checkpointing may keep; what is written into an `out` has to be written again


def _dtype(lead: Tensor, options: str) -> torch.dtype:
    return torch.float32 if FLOAT32_OUTPUT in options else lead.dtype


def _counted_rows(first: Shape, gather_indices: Shape | None, options: str, per_token: str) -> int:
    """M. Where the first operand has one row per token, with the word `per_token`, the indices count: T * topk of
    them, or a capacity."""
    return gather_indices[0] if per_token in options and gather_indices is not None else first[0]


def _rows(first: Tensor, gather_indices: Tensor | None, options: str, per_token: str) -> int:
    return _counted_rows(first.shape, None if gather_indices is None else gather_indices.shape, options, per_token)


def _n_and_k(w: Tensor, w_format: str, m_sizes: Tensor, options: str) -> tuple[int, int]:
    if w_format:
        return packed_shape(w, w_format)[1:]
    rows, columns = w.size(1) if w.dim() == 3 else w.size(0) // m_sizes.size(-1), w.size(-1)
    return (columns, rows) if TRANSPOSED in options else (rows, columns)


def _check_depth(name: str, first: Tensor, letter: str, depth: int, w: Tensor) -> None:
    _check(
        first.size(1) == depth,
        lambda: f"{name} is {list(first.shape)}; its last dimension must be {letter} as in W, {list(w.shape)}",
    )


def _forward(
    x: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, router_weights: Tensor | None = None,
    topk: int = 1, options: str = "", config: Config = None, bias: Tensor | None = None, activation: str = "",
    w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    n, k = _n_and_k(w, w_format, m_sizes, options)
    _check_depth("X", x, "K", k, w)
    rows = _rows(x, gather_indices, options, PERMUTE_X)
    return x.new_empty((rows, n // 2 if activation and is_gated(activation) else n), dtype=_dtype(x, options))


def _dx(
    dy: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, router_weights: Tensor | None = None,
    topk: int = 1, options: str = "", config: Config = None, w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    n, k = _n_and_k(w, w_format, m_sizes, options)
    _check_depth("dY", dy, "N", n, w)
    rows = _rows(dy, gather_indices, options, DY_PER_TOKEN)
    return dy.new_empty((rows, k), dtype=_dtype(dy, options))


def _forward_low_rank(
    x: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, low_rank_rows: Tensor,
    low_rank_weights: Tensor, topk: int = 1, options: str = "", bias: Tensor | None = None, activation: str = "",
    w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    return _forward(x, w, m_sizes, gather_indices, None, topk, options, None, bias, activation, w_scales, w_format)


def _forward_pair(
    x: Tensor, w: Tensor, w_up: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, topk: int = 1,
    options: str = "", bias: Tensor | None = None, activation: str = "",
) -> Tensor:  # fmt: skip
    half = _forward(x, w, m_sizes, gather_indices, None, topk, options)
    return half if activation else half.new_empty((half.size(0), 2 * half.size(1)))


def _dx_low_rank(
    dy: Tensor, w: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, low_rank_rows: Tensor,
    low_rank_weights: Tensor, topk: int = 1, options: str = "", w_scales: Tensor | None = None, w_format: str = "",
) -> Tensor:  # fmt: skip
    return _dx(dy, w, m_sizes, gather_indices, None, topk, options, None, w_scales, w_format)


def _dw(
    dy: Tensor, x: Tensor, m_sizes: Tensor, gather_indices: Tensor | None = None, router_weights: Tensor | None = None,
    topk: int = 1, options: str = "", config: Config = None,
) -> Tensor:  # fmt: skip
    n, k = dy.size(1), x.size(1)
    shape = (m_sizes.size(-1), k, n) if TRANSPOSED in options else (m_sizes.size(-1), n, k)
    return dy.new_empty(shape, dtype=_dtype(dy, options))


def _elements(w: Shape, *rest: Any, **named: Any) -> int:
    """E N K of W [E, N, K] or [E * N, K]. A quantised one has several values in an element; its format is the last
    argument of each operator."""
    word = named.get("w_format") or (rest[-1] if rest and isinstance(rest[-1], str) else "")
    elements = VALUES_PER_ELEMENT.get(format_of(word), 1)
    for extent in w:
        elements *= extent
    return elements


def _forward_flops(
    x: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None = None, router_weights: Shape | None = None,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _counted_rows(x, gather_indices, options, PERMUTE_X) * (_elements(w, *args, **kwargs) // m_sizes[-1])


def _forward_pair_flops(
    x: Shape, w: Shape, w_up: Shape, m_sizes: Shape, gather_indices: Shape | None = None, topk: int = 1,
    options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _forward_flops(x, w, m_sizes, gather_indices, None, topk, options)


def _dx_flops(
    dy: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None = None, router_weights: Shape | None = None,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _counted_rows(dy, gather_indices, options, DY_PER_TOKEN) * (_elements(w, *args, **kwargs) // m_sizes[-1])


def _dx_out_flops(
    dy: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None, router_weights: Shape | None, topk: int,
    options: str, config: Any, out: Shape, w_scales: Shape | None = None, w_format: str = "",
    low_rank_rows: Shape | None = None, low_rank_weights: Shape | None = None, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    if low_rank_rows is not None and low_rank_weights is not None:
        return _low_rank_flops(dy, w, m_sizes, gather_indices, low_rank_rows, low_rank_weights)
    return _dx_flops(dy, w, m_sizes, gather_indices, None, topk, options, w_format=w_format)


def _dw_flops(
    dy: Shape, x: Shape, m_sizes: Shape, gather_indices: Shape | None = None, router_weights: Shape | None = None,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _counted_rows(dy, gather_indices, options, DY_PER_TOKEN) * dy[1] * x[1]


def _low_rank_flops(
    first: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None, low_rank_rows: Shape, low_rank_weights: Shape,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Of forward or dX: the low-rank part is one more product, of the same rows."""
    return 2 * low_rank_rows[0] * ((_elements(w, *args, **kwargs) + _elements(low_rank_weights)) // m_sizes[-1])


def nothing(*args: Any, **kwargs: Any) -> None:
    """The result of an operator that only writes a tensor which is there."""


PRODUCTS: dict[str, Product] = {
    "forward": Product(_forward, _forward_flops, kept=True),
    "forward_plain": Product(_forward, _forward_flops, kept=True),
    "forward_pair": Product(_forward_pair, _forward_pair_flops, kept=True),
    "forward_low_rank": Product(_forward_low_rank, _low_rank_flops, kept=True),
    "forward_out": Product(nothing, _forward_flops),
    "dx": Product(_dx, _dx_flops),
    "dx_low_rank": Product(_dx_low_rank, _low_rank_flops),
    "dx_out": Product(nothing, _dx_out_flops),
    "dw": Product(_dw, _dw_flops),
    "dw_out": Product(nothing, _dw_flops),
}
