"""A low-rank pair beside one stack of experts, and the form in which the products take it."""

from collections.abc import Sequence
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


class Stacked(NamedTuple):
    """Adapters of one dropout as one pair, in the dtype of the rows. The scaling is in `b`."""

    a: Tensor  # [E, r, K]
    b: Tensor  # [E, N, r]
    dropout: float


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


def _scaled(low: LowRank, dtype: torch.dtype) -> Tensor:
    """scaling * B, rounded once."""
    if low.scaling == 1.0:
        return low.B.to(dtype)
    return (low.B.float() * low.scaling).to(dtype)


def _joined(lows: Sequence[LowRank], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Several pairs are one whose rank is the sum of theirs; zeros fill it up to a multiple of RANK_STEP."""
    all_a, all_b = [low.A.to(dtype) for low in lows], [_scaled(low, dtype) for low in lows]
    rank = sum(a.size(1) for a in all_a)
    missing = -rank % RANK_STEP
    if missing:
        a, b = all_a[0], all_b[0]
        all_a.append(a.new_zeros((a.size(0), missing, a.size(2))))
        all_b.append(b.new_zeros((b.size(0), b.size(1), missing)))
    a = all_a[0] if len(all_a) == 1 else torch.cat(all_a, dim=1)
    b = all_b[0] if len(all_b) == 1 else torch.cat(all_b, dim=2)
    return a.contiguous(), b.contiguous()


def stacked(lows: Sequence[LowRank], dtype: torch.dtype) -> list[Stacked]:
    """One pair of all that drop nothing, and each of the others by itself: it sees rows of its own."""
    plain = [low for low in lows if low.dropout == 0.0]
    groups = ([plain] if plain else []) + [[low] for low in lows if low.dropout > 0.0]
    return [Stacked(*_joined(group, dtype), group[0].dropout) for group in groups]
