"""Where the rows of each expert are, in the one argument that the operators have for it.

`m_sizes` of any operator is [E] sizes of segments that follow one another, [2, E] sizes and starts, or [1, E]
cumulative ends (torch's `offs`), int32 or int64 on the device of the rows.
"""

import torch
from torch import Tensor

from moegemm.operators.errors import shown
from moegemm.operators.gradients.derivatives import dispatch_modes, inside_torch_func
from moegemm.operators.options import EXPECTED_ROWS, TAILS_UNDEFINED
from moegemm.operators.rules import is_integer, is_surely

ZERO, UNDEFINED = "zero", "undefined"


def placed(m_sizes: Tensor, starts: Tensor | None, name: str = "m_sizes") -> Tensor:
    """`m_sizes` with starts, if there are any. One launch, no synchronisation."""
    if starts is None:
        return m_sizes
    for argument, tensor in ((name, m_sizes), ("starts", starts)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 1:
            raise ValueError(f"{argument} is {_described(tensor)}; with starts both must be [E]")
    if starts.shape != m_sizes.shape or starts.dtype != m_sizes.dtype or starts.device != m_sizes.device:
        raise ValueError(
            f"starts is {_described(starts)}; it must have shape, dtype and device of {name}, {_described(m_sizes)}"
        )
    return torch.stack((m_sizes, starts))


_MOST_BOUNDS = 64
_bounds: dict[tuple[int, int, torch.dtype, torch.device, int], tuple[Tensor, Tensor]] = {}


def _bounds_of(experts: int, capacity: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the most that `masked` leaves of [sizes, sizes]."""
    begins = torch.arange(experts, device=like.device, dtype=like.dtype) * capacity
    least, most = (torch.full_like(begins, bound) for bound in (torch.iinfo(like.dtype).min, capacity))
    return torch.stack((least, begins)), torch.stack((most, begins))


def _may_be_kept(sizes: Tensor) -> bool:
    """Whether a tensor that is made now is a plain one and has its values now. Transforms and dispatch modes wrap even
    what is made of plain tensors."""
    if torch.compiler.is_compiling() or inside_torch_func() or dispatch_modes() > 0:
        return False
    if type(sizes) is not Tensor or sizes.device.type not in ("cpu", "cuda"):
        return False
    return sizes.device.type == "cpu" or not torch.cuda.is_current_stream_capturing()


def _stream_of(tensor: Tensor) -> int:
    """Where what is made on its device now is written, and may be read without waiting."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def masked(sizes: Tensor, capacity: int) -> Tensor:
    """Sizes, at most `capacity`, and starts of segments that begin at e * capacity. One launch, no synchronisation: the
    starts are bounds that leave nothing else."""
    if sizes.dtype == torch.int32 and is_surely(sizes.size(0) * capacity > torch.iinfo(torch.int32).max):
        sizes = sizes.long()
    if sizes.dtype not in (torch.int32, torch.int64) or not _may_be_kept(sizes):
        begins = torch.arange(sizes.size(0), device=sizes.device, dtype=sizes.dtype) * capacity
        return torch.stack((sizes.clamp(max=capacity), begins))
    key = sizes.size(0), capacity, sizes.dtype, sizes.device, _stream_of(sizes)
    bounds = _bounds.get(key)
    if bounds is None:
        bounds = _bounds_of(*key[:2], sizes)
        if len(_bounds) < _MOST_BOUNDS:
            _bounds[key] = bounds
    return torch.clamp(sizes.expand(2, -1), *bounds)


def _is_number(value: int | torch.SymInt) -> bool:
    """Whether a text can hold it. Tracing knows some by a symbol only: without the words, one graph serves all of them,
    and plans for every row."""
    if not torch.compiler.is_compiling():
        return not isinstance(value, torch.SymInt)
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(value)


def tail_options(tails: str, expected_rows: int | None) -> str:
    """The words for what happens outside every segment, and for how many rows to plan."""
    if tails not in (ZERO, UNDEFINED):
        raise ValueError(f"tails is {shown(tails)}; accepted are 'zero' and 'undefined'")
    words = TAILS_UNDEFINED if tails == UNDEFINED else ""
    if expected_rows is None:
        return words
    if not is_integer(expected_rows):
        raise TypeError(f"expected_rows is {shown(expected_rows)}; an int is accepted, or None for all rows")
    if not _is_number(expected_rows):
        return words
    if expected_rows < 0:
        raise ValueError(f"expected_rows is {expected_rows}; it must not be negative")
    return f"{words}{EXPECTED_ROWS}{expected_rows}"


def _described(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return shown(tensor)
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
