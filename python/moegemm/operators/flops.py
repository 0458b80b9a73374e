"""What torch.utils.flop_counter counts for the products: 2 M N K, whatever the rows' experts.

M is the number of routed rows. m_sizes stays on the device. So rows without an expert count like any other, and the
count is the most that a call may compute. Row operations (route, combine, activations) count nothing, like torch's own
element-wise operators.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from moegemm.operators import flags as bits
from moegemm.operators.loading import ops

Shape = tuple[int, ...]


def _rows(first: Shape, gather_indices: Shape | None, flags: int, gathered: int) -> int:
    """M: where the first operand has one row per token, the indices say how many rows there are."""
    return gather_indices[0] if flags & gathered and gather_indices is not None else first[0]


def _weights(w: Shape) -> int:
    """E N K of W [E, N, K] or [E * N, K]."""
    elements = 1
    for extent in w:
        elements *= extent
    return elements


def _forward(
    x: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None = None, topk_weights: Shape | None = None,
    topk: int = 1, flags: int = 0, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _rows(x, gather_indices, flags, bits.PERMUTE_X) * (_weights(w) // m_sizes[0])


def _dx(
    dy: Shape, w: Shape, m_sizes: Shape, gather_indices: Shape | None = None, topk_weights: Shape | None = None,
    topk: int = 1, flags: int = 0, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _rows(dy, gather_indices, flags, bits.DY_PER_TOKEN) * (_weights(w) // m_sizes[0])


def _dw(
    dy: Shape, x: Shape, m_sizes: Shape, gather_indices: Shape | None = None, topk_weights: Shape | None = None,
    topk: int = 1, flags: int = 0, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * _rows(dy, gather_indices, flags, bits.DY_PER_TOKEN) * dy[1] * x[1]


def _forward_activated(
    x: Shape, w: Shape, bias: Shape | None, m_sizes: Shape, gather_indices: Shape | None, topk: int, flags: int,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return _forward(x, w, m_sizes, gather_indices, None, topk, flags)


def _forward_biased(
    x: Shape, w: Shape, bias: Shape, m_sizes: Shape, gather_indices: Shape | None, topk_weights: Shape | None,
    topk: int, flags: int, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return _forward(x, w, m_sizes, gather_indices, topk_weights, topk, flags)


def register() -> None:
    """Tells torch; once per process."""
    formulas: dict[Callable[..., int], list[Any]] = {
        _forward: [ops.forward, ops.forward_plain, ops.forward_out],
        _dx: [ops.dx, ops.dx_out],
        _dw: [ops.dw, ops.dw_out],
        _forward_activated: [ops.forward_activated],
        _forward_biased: [ops.forward_biased],
    }
    for formula, operators in formulas.items():
        teach: Callable[[Callable[..., int]], object] = register_flop_formula(operators)
        teach(formula)
