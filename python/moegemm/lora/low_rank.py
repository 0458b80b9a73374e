"""A low-rank pair beside one stack of experts, and the form in which the products take it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moegemm.operators.raw import autocast_dtype
from moegemm.operators.rules import require_same_device, require_same_dtype

RANK_STEP = 8  # 16 bytes of a 16-bit row: what the GPU's fast copies need of a row's length


class LowRank(NamedTuple):
    """What an adapter adds to a product: scaling * (dropout(x) A^T) B^T."""

    A: Tensor  # [E, r, K]
    B: Tensor  # [E, N, r]
    scaling: float
    dropout: float = 0.0  # the probability that an element of x does not count; 0 after training


class Pair(NamedTuple):
    """Adapters as one pair of weights, in the layout of W and the dtype of its rows. The scaling is in `b`."""

    a: Tensor  # [E, r, K]; [E, K, r] where W is [E, K, N]
    b: Tensor  # [E, N, r]; [E, r, N]


def require_fitting(name: str, low: LowRank, x: Tensor, experts: int, k: int, n: int) -> None:
    """Refuses a pair that is not one for these experts."""
    a, b = low.A, low.B
    rank = a.size(1) if a.dim() == 3 else -1
    if a.dim() != 3 or tuple(a.shape) != (experts, rank, k):
        raise ValueError(f"{name} has A {list(a.shape)}; its shape must be [E, r, K] = [{experts}, r, {k}]")
    if rank < 1:
        raise ValueError(f"{name} has A {list(a.shape)}; its rank r must be at least 1")
    if b.dim() != 3 or tuple(b.shape) != (experts, n, rank):
        raise ValueError(f"{name} has B {list(b.shape)}; its shape must be [E, N, r] = [{experts}, {n}, {rank}]")
    require_same_device(f"{name}.A", a, "x", x)
    require_same_device(f"{name}.B", b, "x", x)
    require_same_dtype(f"{name}.B", b, f"{name}.A", a)
    if a.dtype not in (torch.float32, x.dtype) and autocast_dtype(x.device) is None:
        raise TypeError(f"{name}.A has dtype {a.dtype}; it must have {x.dtype}, the dtype of x, or torch.float32")


def _places(lows: Sequence[LowRank]) -> Iterator[tuple[LowRank, int, int]]:
    """Each pair with its first place in the joined rank, and its own rank."""
    first = 0
    for low in lows:
        rank = low.A.size(1)
        yield low, first, rank
        first += rank


def _put(source: Tensor, scaling: float, target: Tensor) -> None:
    """scaling * source in the target's dtype, rounded once."""
    if scaling == 1.0:
        target.copy_(source)
    elif torch.compiler.is_compiling():
        target.copy_(source.float() * scaling)
    else:
        torch.mul(source, scaling, out=target)


def _joined(parts: list[tuple[Tensor, float]], rank_dim: int, dtype: torch.dtype) -> Tensor:
    """The parts one after another along the rank, zeros up to a multiple of RANK_STEP."""
    first, scaling = parts[0]
    rank = sum(part.size(rank_dim) for part, _ in parts)
    padded = rank + -rank % RANK_STEP
    if len(parts) == 1 and padded == rank and scaling == 1.0 and first.dtype == dtype and first.is_contiguous():
        return first
    shape = [padded if dim == rank_dim else first.size(dim) for dim in range(3)]
    joined = first.new_empty(shape, dtype=dtype)
    at = 0
    for part, factor in parts:
        _put(part, factor, joined.narrow(rank_dim, at, part.size(rank_dim)))
        at += part.size(rank_dim)
    if padded > rank:
        joined.narrow(rank_dim, rank, padded - rank).zero_()
    return joined


def pair_of(lows: Sequence[LowRank], dtype: torch.dtype, transposed: bool) -> Pair:
    """Several pairs are one whose rank is the sum of theirs. Not differentiable: see split_gradients."""
    all_a = [(low.A.detach().transpose(1, 2) if transposed else low.A.detach(), 1.0) for low in lows]
    all_b = [(low.B.detach().transpose(1, 2) if transposed else low.B.detach(), low.scaling) for low in lows]
    return Pair(_joined(all_a, 2 if transposed else 1, dtype), _joined(all_b, 1 if transposed else 2, dtype))


def split_gradients(lows: Sequence[LowRank], d_a: Tensor | None, d_b: Tensor | None) -> list[Tensor | None]:
    """The gradients of A and B of each pair, from d_a [E, r, K] and d_b [E, N, r] of the joined one."""
    found: list[Tensor | None] = []
    for low, first, rank in _places(lows):
        found.append(None if d_a is None else d_a.narrow(1, first, rank).to(low.A.dtype))
        found.append(None if d_b is None else (d_b.narrow(2, first, rank) * low.scaling).to(low.B.dtype))
    return found
