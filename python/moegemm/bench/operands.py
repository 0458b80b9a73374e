"""Random operands of a case, as a layer would hold them, and the fp32 reference on samples."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moegemm.bench.cases import Case

SAMPLED_EXPERTS = 6
SAMPLED_ROWS = 8  # of each sampled expert; for dW, rows of its gradient
SCAN_ELEMS = 1 << 28  # elements looked at together when searching for NaN


def draw_experts(case: Case, device: str, seed: int) -> Tensor:
    """[T, topk] expert ids: topk different experts per token."""
    tokens, topk, experts = case.tokens, case.model.topk, case.model.experts
    if case.routing == "balanced":
        flat = torch.arange(tokens * topk, device=device) % experts
        return flat.view(tokens, topk)
    generator = torch.Generator(device=device).manual_seed(seed)
    log_odds = torch.zeros(experts, device=device)
    if case.routing == "zipf":
        ranks = torch.randperm(experts, generator=generator, device=device) + 1
        log_odds = -ranks.float().log()
    # The largest of log-odds plus Gumbel noise draw without replacement in proportion to the odds.
    uniform = torch.rand(tokens, experts, generator=generator, device=device).clamp_(1e-30, 1 - 1e-7)
    return (log_odds - (-uniform.log()).log()).topk(topk, dim=1).indices


@dataclass
class Routing:
    expert_ids: Tensor  # [T, topk] int64
    m_sizes: Tensor  # [E] int32
    gather_indices: Tensor  # [M] int32
    gather: Tensor  # [M] int64, the same
    token_of_row: Tensor  # [M] int64
    inverse: Tensor  # [M] int64: position of each flat row
    ends: Tensor  # [E] int32: where each segment ends, torch's `offs`
    sizes: list[int]  # m_sizes on the host

    @classmethod
    def of(cls, expert_ids: Tensor, experts: int) -> "Routing":
        """From torch's own sort, so that a fault of ours cannot hide in the reference."""
        topk = expert_ids.size(1)
        flat = expert_ids.reshape(-1)
        gather = flat.sort(stable=True).indices
        sizes = torch.bincount(flat, minlength=experts)
        return cls(
            expert_ids,
            sizes.int(),
            gather.int(),
            gather,
            gather // topk,
            gather.argsort(),
            sizes.cumsum(0).int(),
            sizes.tolist(),
        )

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """Expert, first row, end row."""
        begin = 0
        for expert, size in enumerate(self.sizes):
            yield expert, begin, begin + size
            begin += size


@dataclass
class Operands:
    """`rows_k` and `rows_n` are the [M, K] and [M, N] operands in expert order: what dense products and the reference
    read, and what torch's user first has to make where the layer holds `X` or `dY` in another order."""

    case: Case
    routing: Routing
    # Tensors, or None where the product has no such operand.
    W: Any  # [E, N, K]
    X: Any  # [T, K] for the first GEMM, else [M, K]
    dY: Any  # [M, N], flat order for the second GEMM
    rows_k: Tensor | None
    rows_n: Tensor | None
    topk_weights: Tensor | None  # [M] fp32, for fwd2
    out: Tensor  # what ours writes


def randn(*shape: int, device: str, dtype: torch.dtype, std: float = 1.0) -> Tensor:
    return torch.empty(*shape, device=device, dtype=dtype).normal_(0.0, std)


def bytes_needed(case: Case) -> int:
    """Device memory that a case takes at its peak, roughly: operands, sorted copies, results of all contenders."""
    experts, n, k = case.model.weight_shape(case.op)
    weights, rows_k, rows_n = 2 * experts * n * k, 2 * case.rows * k, 2 * case.rows * n
    if case.product == "dW":
        needed = 2 * weights + 3 * rows_k + 3 * rows_n + 4 * case.rows * k
    elif case.product == "forward":
        needed = weights + 3 * rows_k + 4 * rows_n
    else:
        needed = weights + 4 * rows_k + 3 * rows_n
    return int(1.05 * needed) + 4 * n * k * SAMPLED_EXPERTS + (2 << 30)


def make_weights(case: Case, device: str, dtype: torch.dtype) -> Tensor:
    experts, n, k = case.model.weight_shape(case.op)
    return randn(experts, n, k, device=device, dtype=dtype, std=1 / math.sqrt(k))


def make_operands(case: Case, W: Tensor | None, device: str, dtype: torch.dtype, seed: int) -> Operands:
    experts, n, k = case.model.weight_shape(case.op)
    first = case.op.endswith("1")
    routing = Routing.of(draw_experts(case, device, seed), experts)
    X = dY = rows_k = rows_n = topk_weights = None
    if case.product != "dX":
        X = randn(case.tokens if first else case.rows, k, device=device, dtype=dtype)
        rows_k = X.index_select(0, routing.token_of_row) if first else X
    if case.product != "forward":
        dY = randn(case.rows, n, device=device, dtype=dtype)
        rows_n = dY if first else dY.index_select(0, routing.gather)
    if case.op == "fwd2":
        topk_weights = torch.rand(case.rows, device=device) + 0.1
    shape = {"forward": (case.rows, n), "dX": (case.rows, k), "dW": (experts, n, k)}[case.product]
    out = torch.empty(shape, device=device, dtype=dtype)
    return Operands(case, routing, W, X, dY, rows_k, rows_n, topk_weights, out)


def sampled_segments(operands: Operands, with_empty: bool) -> list[tuple[int, int, int]]:
    """The first, the last, the largest and a few other segments that have rows, and perhaps an empty one."""
    segments = list(operands.routing.segments())
    filled = [s for s in segments if s[2] > s[1]]
    largest = max(filled, key=lambda s: s[2] - s[1])
    step = max(1, len(filled) // (SAMPLED_EXPERTS - 3))
    chosen = [filled[0], filled[-1], largest, *filled[::step]]
    chosen = list(dict.fromkeys(chosen))[:SAMPLED_EXPERTS]
    if with_empty:
        chosen += [s for s in segments if s[2] == s[1]][:1]
    return chosen


def sampled_positions(begin: int, end: int, device: torch.device) -> Tensor:
    """Both ends and an even spread between them."""
    return torch.linspace(begin, end - 1, min(SAMPLED_ROWS, end - begin), device=device, dtype=torch.float64).long()


def relative_error(operands: Operands, result: Tensor, with_empty: bool = True) -> float:
    """||result - reference|| / ||reference|| over the samples; NaN if a sample is NaN."""
    wrong = torch.zeros((), dtype=torch.float64, device=result.device)
    total = torch.zeros_like(wrong)
    for expert, begin, end in sampled_segments(operands, with_empty and operands.case.product == "dW"):
        got, expected = _samples(operands, result, expert, begin, end)
        wrong += (got.double() - expected.double()).square().sum()
        total += expected.double().square().sum()
    return float((wrong / total).sqrt())


def _samples(operands: Operands, result: Tensor, expert: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    if operands.case.product == "dW":
        assert operands.rows_k is not None
        assert operands.rows_n is not None
        columns = sampled_positions(0, operands.rows_n.size(1), result.device)
        dy = operands.rows_n[begin:end].index_select(1, columns).float()
        return result[expert].index_select(0, columns), dy.t() @ operands.rows_k[begin:end].float()
    assert operands.W is not None
    rows = sampled_positions(begin, end, result.device)
    w = operands.W[expert].float()
    flat = operands.routing.gather[rows]
    if operands.case.product == "forward":
        assert operands.rows_k is not None
        expected = operands.rows_k[rows].float() @ w.t()
    else:
        assert operands.rows_n is not None
        expected = operands.rows_n[rows].float() @ w
    if operands.topk_weights is not None:
        expected *= operands.topk_weights[flat, None]
    scattered = operands.case.op in ("fwd2", "dx1")
    return result[flat if scattered else rows], expected


def has_nan(tensor: Tensor) -> bool:
    """Looks in pieces: a mask of a whole gradient would take half its memory again."""
    return any(bool(piece.isnan().any()) for piece in torch.split(tensor.view(-1), SCAN_ELEMS))
