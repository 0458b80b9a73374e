"""The three raw functions, called alike."""

import moegemm
import torch
from reference import Case

RAW = ["grouped_gemm_forward", "grouped_gemm_dX", "grouped_gemm_dW"]


def raw_call(name: str, case: Case, dY: torch.Tensor | None = None, **options) -> torch.Tensor:
    """The function of that name with the case's tensors; without a dY, with the same one each time."""
    named = {"permute_x": case.permute_x, "permute_y": case.permute_y, "fuse_mul_post": case.fuse_mul_post}
    named["topk_weights"] = case.topk_weights
    rows, n = case.rows, case.W.size(1)
    if dY is None:
        dY = torch.linspace(-1, 1, rows * n).view(rows, n).to(case.X)
    X, W, m_sizes, indices, topk = case.X, case.W, case.m_sizes, case.gather_indices, case.topk
    if name == "grouped_gemm_forward":
        return moegemm.grouped_gemm_forward(X, W, topk, m_sizes, indices, **named, **options)
    if name == "grouped_gemm_dX":
        return moegemm.grouped_gemm_dX(dY, W, indices, m_sizes, topk, **named, **options)
    return moegemm.grouped_gemm_dW(X, dY, m_sizes, indices, topk, **named, **options)
