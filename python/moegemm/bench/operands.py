"""Random operands of a case, as a layer would hold them, and the reference on samples: fp32, on a CPU fp64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
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
    router_weights: Tensor | None  # [M] fp32, for fwd2
    out: Tensor  # what ours writes

    # What a user of torch or of another library does around their products.

    def sorted_x(self) -> Tensor:
        """[M, K] in expert order: a copy for the first GEMM."""
        x: Tensor = self.X
        return x.index_select(0, self.routing.token_of_row) if self.case.first else x

    def sorted_dy(self) -> Tensor:
        """[M, N] in expert order: a copy for the second GEMM."""
        dy: Tensor = self.dY
        return dy if self.case.first else dy.index_select(0, self.routing.gather)

    def sorted_rows(self) -> Tensor:
        """What forward or dX multiplies by the weights."""
        return self.sorted_x() if self.case.product == "forward" else self.sorted_dy()

    def weights_as_factor(self) -> Tensor:
        """The right operand of torch.matmul in forward or dX."""
        w: Tensor = self.W
        return w.transpose(-2, -1) if self.case.product == "forward" else w

    @cached_property
    def row_weights(self) -> Tensor | None:
        """[M, 1] in the dtype of the result."""
        return None if self.router_weights is None else self.router_weights.to(self.out.dtype)[:, None]

    def delivered(self, rows: Tensor) -> Tensor:
        """Rows of a result in expert order, as the layer wants them: fwd2 and dx1 in flat order (by the inverse
        permutation: torch's fastest scatter), fwd2 weighted."""
        if not self.case.scatters:
            return rows
        back = rows.index_select(0, self.routing.inverse)
        return back if self.row_weights is None else back.mul_(self.row_weights)


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


class SharedWeights:
    """The weights of one case, kept while those that follow read the same ones."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._key: tuple[str, bool] | None = None
        self._held: Tensor | None = None

    def missing_bytes(self, case: Case) -> int:
        """How much more memory a case wants than is free. Gives back what it does not read: dW, which reads no weights,
        needs that memory for two gradients."""
        if self._key != case.weights_key:
            self._key = self._held = None
        if self._device != "cuda":
            return bytes_needed(case) - available_host_bytes()
        torch.cuda.empty_cache()
        held = 0 if self._held is None else self._held.numel() * self._held.element_size()
        return bytes_needed(case) - torch.cuda.mem_get_info()[0] - held

    def of(self, case: Case) -> Tensor | None:
        """The weights that a case reads."""
        if self._held is None or self._key != case.weights_key:
            self._key = self._held = None  # before the others are made
            self._key = case.weights_key
            self._held = None if self._key is None else make_weights(case, self._device, self._dtype)
        return self._held


def available_host_bytes() -> int:
    """Memory that can be had without swapping; plenty where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1 << 62
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 1 << 62)


def make_operands(case: Case, W: Tensor | None, device: str, dtype: torch.dtype, seed: int) -> Operands:
    experts, n, k = case.model.weight_shape(case.op)
    routing = Routing.of(draw_experts(case, device, seed), experts)
    X = dY = router_weights = None
    if case.product != "dX":
        X = randn(case.tokens if case.first else case.rows, k, device=device, dtype=dtype)
    if case.product != "forward":
        dY = randn(case.rows, n, device=device, dtype=dtype)
    if case.op == "fwd2":
        router_weights = torch.rand(case.rows, device=device) + 0.1
    shape = {"forward": (case.rows, n), "dX": (case.rows, k), "dW": (experts, n, k)}[case.product]
    out = torch.empty(shape, device=device, dtype=dtype)
    operands = Operands(case, routing, W, X, dY, None, None, router_weights, out)
    operands.rows_k = None if X is None else operands.sorted_x()
    operands.rows_n = None if dY is None else operands.sorted_dy()
    return operands


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
    wide = torch.float32 if result.is_cuda else torch.float64  # a GPU may have few units for the latter
    if operands.case.product == "dW":
        assert operands.rows_k is not None
        assert operands.rows_n is not None
        columns = sampled_positions(0, operands.rows_n.size(1), result.device)
        dy = operands.rows_n[begin:end].index_select(1, columns).to(wide)
        return result[expert].index_select(0, columns), dy.t() @ operands.rows_k[begin:end].to(wide)
    assert operands.W is not None
    rows = sampled_positions(begin, end, result.device)
    w = operands.W[expert].to(wide)
    flat = operands.routing.gather[rows]
    if operands.case.product == "forward":
        assert operands.rows_k is not None
        expected = operands.rows_k[rows].to(wide) @ w.t()
    else:
        assert operands.rows_n is not None
        expected = operands.rows_n[rows].to(wide) @ w
    if operands.router_weights is not None:
        expected *= operands.router_weights[flat, None]
    return result[flat if operands.case.scatters else rows], expected


def has_nan(tensor: Tensor) -> bool:
    """Looks in pieces: a mask of a whole gradient would take half its memory again."""
    return any(bool(piece.isnan().any()) for piece in torch.split(tensor.view(-1), SCAN_ELEMS))
