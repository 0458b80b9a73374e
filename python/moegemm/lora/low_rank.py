"""A low-rank pair beside one stack of experts, and the form in which the products take it."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moegemm.formats import FORMATS
from moegemm.operators.loading import ops
from moegemm.operators.raw import autocast_dtype
from moegemm.operators.registered.factors import RANK_STEP
from moegemm.operators.rules import (
    require_number,
    require_probability,
    require_same_device,
    require_same_dtype,
    require_tensor,
)

_joined_factors: Callable[..., list[Tensor]] = ops.joined_factors.default
_scaled_like: Callable[..., list[Tensor]] = ops.scaled_like.default


class LowRank(NamedTuple):
    """What an adapter adds to a product: scaling * (dropout(x) A^T) B^T, with A [E, r, K] and B [E, N, r] in x's dtype
    or fp32. `dropout` is the probability that an element of x does not count; 0 after training."""

    A: Tensor
    B: Tensor
    scaling: float
    dropout: float = 0.0


class Pair(NamedTuple):
    """Adapters as one pair of weights, in the layout of W and the dtype of its rows. The scaling is in `b`."""

    a: Tensor  # [E, r, K]; [E, K, r] where W is [E, K, N]
    b: Tensor  # [E, N, r]; [E, r, N]


def require_fitting(name: str, low: LowRank, x: Tensor, experts: int, k: int, n: int) -> None:
    """Refuses a pair that is not one for these experts."""
    a, b = low.A, low.B
    require_tensor(f"{name}.A", a)
    require_tensor(f"{name}.B", b)
    require_number(f"{name}.scaling", low.scaling)
    require_probability(f"{name}.dropout", low.dropout)
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
    if a.dtype not in ((torch.float32, x.dtype) if autocast_dtype(x.device) is None else FORMATS):
        raise TypeError(f"{name}.A has dtype {a.dtype}; it must have {x.dtype}, the dtype of x, or torch.float32")


def _places(lows: Sequence[LowRank]) -> Iterator[tuple[LowRank, int, int]]:
    """Each pair with its first place in the joined rank, and its own rank."""
    first = 0
    for low in lows:
        rank = low.A.size(1)
        yield low, first, rank
        first += rank


class _Joined(NamedTuple):
    """Parts one after another along the rank, each times its scaling."""

    parts: list[Tensor]
    scalings: list[float]
    rank_dim: int

    def is_ready(self, dtype: torch.dtype) -> bool:
        """Whether a product can read the one part where it is."""
        first = self.parts[0]
        alone = len(self.parts) == 1 and self.scalings[0] == 1.0 and first.size(self.rank_dim) % RANK_STEP == 0
        return alone and first.dtype == dtype and first.is_contiguous()


def _factors(lows: Sequence[LowRank], transposed: bool) -> tuple[_Joined, _Joined]:
    """All A and all B, in the layout of W."""
    all_a, all_b = ([factor.detach() for factor in factors] for factors in zip(*(low[:2] for low in lows), strict=True))
    if transposed:
        all_a, all_b = ([factor.transpose(1, 2) for factor in factors] for factors in (all_a, all_b))
    scalings = [low.scaling for low in lows]
    return _Joined(all_a, [1.0] * len(lows), 2 if transposed else 1), _Joined(all_b, scalings, 1 if transposed else 2)


class Adapted(NamedTuple):
    """A product's adapters."""

    lows: Sequence[LowRank]
    transposed: bool  # W is [E, K, N]
    copies_a: bool = True  # else the thin product reads the one A where it is: see factor_rows


def pairs_of(products: Sequence[Adapted], like: Tensor, m_sizes: Tensor | None) -> list[Pair | None]:
    """The pairs of several products in the dtype of `like`, by one launch. Several adapters are one whose rank is the
    sum of theirs, with zeros up to a multiple of RANK_STEP. Experts without rows get no weights where m_sizes tells
    which. Not differentiable: see split_gradients."""
    joined = [_factors(product.lows, product.transposed) if product.lows else None for product in products]
    needed = [
        one
        for product, pair in zip(products, joined, strict=True)
        if pair is not None
        for one in (pair if product.copies_a else pair[1:])
    ]
    copied = [one for one in needed if not one.is_ready(like.dtype)]
    copies: Iterator[Tensor] = iter(())
    if copied:
        copies = iter(
            _joined_factors(
                [part for one in copied for part in one.parts],
                [scaling for one in copied for scaling in one.scalings],
                [len(one.parts) for one in copied],
                [one.rank_dim for one in copied],
                like,
                m_sizes if m_sizes is not None and m_sizes.dim() == 1 else None,
            )
        )
    found: list[Pair | None] = []
    for product, pair in zip(products, joined, strict=True):
        if pair is None:
            found.append(None)
            continue
        a, b = pair
        read_in_place = not product.copies_a or a.is_ready(like.dtype)
        first = a.parts[0] if read_in_place else next(copies)
        found.append(Pair(first, b.parts[0] if b.is_ready(like.dtype) else next(copies)))
    return found


def split_gradients(lows: Sequence[LowRank], d_a: Tensor | None, d_b: Tensor | None) -> list[Tensor | None]:
    """The gradients of A and B of each pair, in their memory layout and dtype, from d_a [E, r, K] and d_b [E, N, r] of
    the joined one."""
    found: list[Tensor | None] = []
    sources, like, scalings, at = [], [], [], []
    for low, first, rank in _places(lows):
        for factor, gradient, rank_dim, scaling in ((low.A, d_a, 1, 1.0), (low.B, d_b, 2, low.scaling)):
            found.append(gradient)
            if gradient is None:
                continue
            whole = gradient.size(rank_dim) == rank and gradient.dtype == factor.dtype
            if whole and scaling == 1.0 and factor.is_contiguous():
                continue
            sources.append(gradient if gradient.size(rank_dim) == rank else gradient.narrow(rank_dim, first, rank))
            like.append(factor)
            scalings.append(scaling)
            at.append(len(found) - 1)
    if sources:
        for index, gradient in zip(at, _scaled_like(sources, like, scalings), strict=True):
            found[index] = gradient
    return found
