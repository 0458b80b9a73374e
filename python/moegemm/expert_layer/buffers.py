"""The caller's memory for what a layer makes: its output, and the gradient of its input."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moegemm.operators.packed import Packed
from moegemm.operators.rules import require_same_device, require_tensor


class LayerBuffers(NamedTuple):
    """Both have the shape of the layer's input."""

    out: Tensor | None
    grad_out: Tensor | None
    names: tuple[str, str]


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Its first byte and the one after its last; None for a tensor without memory."""
    if isinstance(tensor, FakeTensor):  # asking it for an address is a warning
        return None
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # a transform's
        return None
    if begin == 0 or tensor.numel() == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether they share memory, as far as their pitches tell: two column ranges of one matrix do not."""
    first, second = _span(a), _span(b)
    if first is None or second is None or first[1] <= second[0] or second[1] <= first[0]:
        return False
    pitch = a.stride(0) * a.element_size()
    if a.dim() != 2 or b.dim() != 2 or pitch == 0 or pitch != b.stride(0) * b.element_size():
        return True
    if b.stride(1) != 1 and b.size(1) > 1:
        return True
    distance = (second[0] - first[0]) % pitch
    widths = a.size(1) * a.element_size(), b.size(1) * b.element_size()
    return not (distance >= widths[0] and distance + widths[1] <= pitch)


def _is_walkable(rows: Tensor) -> bool:
    """Whether its rows are evenly spaced and do not overlap. The stride of a dimension of size 1 says nothing."""
    if rows.size(-1) != 1 and rows.stride(-1) != 1:
        return False
    pitch: int | None = None
    spanned: int | None = None
    for dim in range(rows.dim() - 2, -1, -1):  # leading dimensions that make one
        if rows.size(dim) == 1:
            continue
        if pitch is None:
            pitch = rows.stride(dim)
        elif rows.stride(dim) != spanned:
            return False
        spanned = rows.stride(dim) * rows.size(dim)
    return pitch is None or pitch >= rows.size(-1)


def _as_rows(name: str, buffer: Tensor, like: Tensor) -> Tensor:
    """The buffer as a matrix [rows, H] that a kernel can walk."""
    if buffer.dim() != like.dim() or any(a != b for a, b in zip(buffer.shape, like.shape, strict=True)):
        raise ValueError(f"{name} is {list(buffer.shape)}; its shape must be {list(like.shape)}, that of the input")
    rows = buffer.unsqueeze(0) if buffer.dim() == 1 else buffer
    if not _is_walkable(rows):
        if rows.numel() == 0:
            return rows.new_empty((rows.shape[:-1].numel(), rows.size(-1)))
        raise ValueError(
            f"{name} has strides {list(buffer.stride())}; its last dimension must be contiguous and its rows evenly "
            "spaced and at least that far apart"
        )
    return rows if rows.dim() == 2 else rows.view(-1, rows.size(-1))


def _checked(name: str, buffer: Tensor, x: Tensor, dtype: torch.dtype, others: Mapping[str, object]) -> Tensor:
    require_tensor(name, buffer)
    require_same_device(name, buffer, "the input", x)
    if buffer.dtype != dtype:
        raise TypeError(f"{name} has dtype {buffer.dtype}; it must have {dtype}, the dtype of the layer")
    if buffer.requires_grad:
        raise RuntimeError(f"{name} requires grad; a tensor that does not is accepted: its values are overwritten")
    rows = _as_rows(name, buffer, x)
    if not torch.compiler.is_compiling():
        for other, tensor in others.items():
            parts = (tensor.values, tensor.scales) if isinstance(tensor, Packed) else (tensor,)
            if any(isinstance(part, Tensor) and _overlap(rows, part) for part in parts):
                raise _shares(name, other)
    return rows


def _shares(name: str, other: str) -> ValueError:
    return ValueError(f"{name} shares memory with {other}; it must have its own")


def refuse_memory_of(name: str, buffer: Tensor | None, other: str, tensor: Tensor) -> None:
    """Before the buffer is written while the tensor is still to be read."""
    if buffer is not None and not torch.compiler.is_compiling() and _overlap(buffer, tensor):
        raise _shares(name, other)


def returned(result: Tensor, memory: Tensor | None, out: Tensor | None, shape: torch.Size) -> Tensor:
    """What a caller gets: the result in the shape of the input, in `out` where `memory`, its rows, were written. Never
    `out` itself: reentrant checkpointing makes what it is given a part of its graph."""
    return result.view(shape) if out is None or result is not memory else out.detach()


def checked_buffers(
    buffers: LayerBuffers, x: Tensor, dtype: torch.dtype, inputs: Mapping[str, object]
) -> tuple[Tensor | None, Tensor | None]:
    """Both as matrices, each if given. `x` is the input as the caller gave it, `dtype` what the layer computes in."""
    out, grad_out, names = buffers
    if out is not None:
        out = _checked(names[0], out, x, dtype, inputs)
    if grad_out is not None:
        grad_out = _checked(names[1], grad_out, x, dtype, {**inputs, names[0]: out})
    return out, grad_out
