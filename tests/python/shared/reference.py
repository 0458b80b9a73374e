"""The contract in plain torch: one loop over experts, differentiable by torch, run in float64 by the tests."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class Case:
    """One call of grouped_gemm, with everything that it takes."""

    X: Tensor  # [T, K] with permute_x, else [M, K]
    W: Tensor  # [E, N, K]
    m_sizes: Tensor
    topk: int
    gather_indices: Tensor | None = None
    topk_weights: Tensor | None = None
    permute_x: bool = False
    permute_y: bool = False
    fuse_mul_post: bool = False

    @property
    def rows(self) -> int:
        return len(self.gather_indices) if self.permute_x else len(self.X)

    @property
    def dw_roundings(self) -> int:
        """On a GPU the rows that fuse_mul_post scales are rounded before dW reads them."""
        return 2 if self.fuse_mul_post and self.X.is_cuda else 1

    def arguments(self) -> dict:
        return {
            "X": self.X,
            "W": self.W,
            "m_sizes": self.m_sizes,
            "topk": self.topk,
            "gather_indices": self.gather_indices,
            "topk_weights": self.topk_weights,
            "permute_x": self.permute_x,
            "permute_y": self.permute_y,
            "fuse_mul_post": self.fuse_mul_post,
            "is_first_gemm": not self.permute_y,
        }

    def map_values(self, function) -> "Case":
        """The same case with `function` applied to X, W and topk_weights."""
        weights = None if self.topk_weights is None else function(self.topk_weights)
        return replace(self, X=function(self.X), W=function(self.W), topk_weights=weights)


def reference_forward(case: Case) -> Tensor:
    """Y of `case`, in the dtype of its tensors."""
    rows = case.X[case.gather_indices.long() // case.topk] if case.permute_x else case.X
    start, parts = 0, []
    for expert, size in enumerate(case.m_sizes.tolist()):
        size = min(max(size, 0), len(rows) - start)
        parts.append(rows[start : start + size] @ case.W[expert].T)
        start += size
    Y = torch.cat(parts)
    if case.permute_y:
        used = case.gather_indices[:start].long()
        if case.fuse_mul_post:
            Y = Y * case.topk_weights.reshape(-1)[used].unsqueeze(1).to(Y.dtype)
        return torch.zeros(case.rows, Y.shape[1], dtype=Y.dtype, device=Y.device).index_copy(0, used, Y)
    return torch.cat([Y, Y.new_zeros(case.rows - start, Y.shape[1])])


@dataclass
class Results:
    """Y and the gradients of sum(Y * dY); None where no gradient was asked for."""

    Y: Tensor
    dX: Tensor | None = None
    dW: Tensor | None = None
    d_weights: Tensor | None = None


def reference_results(case: Case, dY: Tensor) -> Results:
    """Everything, in float64."""
    exact = case.map_values(lambda t: t.detach().double().requires_grad_())
    Y = reference_forward(exact)
    wanted = [exact.X, exact.W] + ([exact.topk_weights] if case.fuse_mul_post else [])
    gradients = torch.autograd.grad(Y, wanted, dY.double(), allow_unused=True, materialize_grads=True)
    return Results(Y.detach(), *gradients)


def magnitudes(case: Case, dY: Tensor) -> Results:
    """The same sums over absolute values: what rounding errors of each element are relative to."""
    return reference_results(case.map_values(torch.abs), dY.abs())


def assert_close(
    name: str,
    got: Tensor,
    expected: Tensor,
    magnitude: Tensor,
    depth: int,
    roundings: int = 1,
    inner: torch.dtype | None = None,
) -> None:
    """Bounds from the dot length and the operands' norms: `roundings` to the dtype of `got`, on top of a sum of
    `depth` products in fp32. All but the last are of parts of the sum, so they are relative to `magnitude`. `inner`
    is the dtype of those parts where it is narrower: below its normal range their error is absolute."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not got.numel():
        return
    error = (got.double() - expected).abs()
    assert torch.isfinite(error).all(), f"{name}: {(~torch.isfinite(error)).sum()} elements are not finite"
    unit = torch.finfo(got.dtype).eps / 2
    tiny = torch.finfo(got.dtype).smallest_normal
    if inner is not None:
        tiny += depth * torch.finfo(inner).smallest_normal * torch.finfo(inner).eps * 4
    bound = (roundings * unit + depth * 2.0**-24) * magnitude * 1.01 + tiny
    excess = (error - bound).max().item()
    assert excess <= 0, f"{name}: an element is off by {excess} more than its bound"
    # A wrong row is invisible to bounds that are loose for large sums; it is not to the norm.
    inside = (roundings - 1) * unit + 4 * max(depth, 1) ** 0.5 * 2.0**-24
    limit = unit * expected.norm().item() + inside * magnitude.norm().item() + tiny * got.numel() ** 0.5
    assert error.norm().item() <= limit, f"{name}: error {error.norm().item()} in the norm, at most {limit} is rounding"
