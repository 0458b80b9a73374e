"""What torch has to know of the operators that copy the factors of low-rank pairs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

RANK_STEP = 8  # of moegemm::padded_rank, include/moegemm/passes.h


def _joined_factors(
    parts: list[Tensor], scalings: list[float], counts: list[int], ranks: list[int], like: Tensor,
    m_sizes: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    results, at = [], 0
    for count, rank_dim in zip(counts, ranks, strict=True):
        own = parts[at : at + count]
        rank = sum(part.size(rank_dim) for part in own)
        shape = list(own[0].shape)
        shape[rank_dim] = rank + -rank % RANK_STEP
        results.append(own[0].new_empty(shape, dtype=like.dtype))
        at += count
    return results


def _scaled_like(sources: list[Tensor], like: list[Tensor], scalings: list[float]) -> list[Tensor]:
    results = []
    for one in like:
        strides, step = [1, 1, 1], 1
        for dim in sorted((2, 1, 0), key=one.stride):
            strides[dim] = step
            step *= max(one.size(dim), 1)
        results.append(one.new_empty_strided(one.shape, strides))
    return results


def _factor_rows(
    x: Tensor, factor: Tensor, m_sizes: Tensor, gather_indices: Tensor | None, topk: int, rows_pending: bool = False,
    apart: bool = False,
) -> Tensor:  # fmt: skip
    rows, rank = x.size(0) if gather_indices is None else gather_indices.size(0), factor.size(1)
    return x.new_empty((rows, rank + -rank % RANK_STEP))


FAKES: dict[str, Callable[..., Any]] = {
    "joined_factors": _joined_factors,
    "scaled_like": _scaled_like,
    "factor_rows": _factor_rows,
}
