"""What torch.utils.flop_counter counts for the products: 2 M N K, whatever the rows' experts.

M is the number of routed rows. m_sizes stays on the device. So rows without an expert count like any other, and the
count is the most that a call may compute. Row operations (route, combine, activations) count nothing, like torch's own
element-wise operators.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from moegemm.operators.loading import ops
from moegemm.operators.options import DY_PER_TOKEN, PERMUTE_X
from moegemm.operators.packed import VALUES_PER_ELEMENT, format_of

Shape = tuple[int, ...]


def _rows(first: Shape, gather_indices: Shape | None, options: str, per_token: str) -> int:
    """M: where the first operand has one row per token, the indices say how many rows there are."""
    return gather_indices[0] if per_token in options and gather_indices is not None else first[0]


def _weights(w: Shape, *rest: Any, **named: Any) -> int:
    """E N K of W [E, N, K] or [E * N, K]. A quantised one has several values in an element; its format is the last
    argument of each operator."""
    word = named.get("w_format") or (rest[-1] if rest and isinstance(rest[-1], str) else "")
    elements = VALUES_PER_ELEMENT.get(format_of(word), 1)
    for extent in w:
        elements *= extent
    return elements


def _forward(
    x: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None = None, router_weights: Shape | None = None,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _rows(x, gather_indices, options, PERMUTE_X) * (_weights(w, *args, **kwargs) // m_sizes[-1])


def _forward_pair(
    x: Shape, w: Shape, w_up: Shape, m_sizes: Shape, gather_indices: Shape | None = None, topk: int = 1,
    options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _forward(x, w, m_sizes, gather_indices, None, topk, options)


def _dx(
    dy: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None = None, router_weights: Shape | None = None,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _rows(dy, gather_indices, options, DY_PER_TOKEN) * (_weights(w, *args, **kwargs) // m_sizes[-1])


def _dx_out(
    dy: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None, router_weights: Shape | None, topk: int,
    options: str, config: Any, out: Shape, w_scales: Shape | None = None, w_format: str = "",
    low_rank_rows: Shape | None = None, low_rank_weights: Shape | None = None, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    if low_rank_rows is not None and low_rank_weights is not None:
        return _low_rank(dy, w, m_sizes, gather_indices, low_rank_rows, low_rank_weights)
    return _dx(dy, w, m_sizes, gather_indices, None, topk, options, w_format=w_format)


def _dw(
    dy: Shape, x: Shape, m_sizes: Shape, gather_indices: Shape | None = None, router_weights: Shape | None = None,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _rows(dy, gather_indices, options, DY_PER_TOKEN) * dy[1] * x[1]


def _low_rank(
    first: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None, low_rank_rows: Shape, low_rank_weights: Shape,
    topk: int = 1, options: str = "", *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """Of forward or dX: the low-rank part is one more product, of the same rows."""
    return 2 * low_rank_rows[0] * ((_weights(w, *args, **kwargs) + _weights(low_rank_weights)) // m_sizes[-1])


def register() -> None:
    """Tells torch; once per process."""
    formulas: dict[Callable[..., int], list[Any]] = {
        _forward: [ops.forward, ops.forward_plain, ops.forward_out],
        _forward_pair: [ops.forward_pair],
        _dx: [ops.dx],
        _dx_out: [ops.dx_out],
        _dw: [ops.dw, ops.dw_out],
        _low_rank: [ops.forward_low_rank, ops.dx_low_rank],
    }
    for formula, operators in formulas.items():
        teach: Callable[[Callable[..., int]], object] = register_flop_formula(operators)
        teach(formula)
