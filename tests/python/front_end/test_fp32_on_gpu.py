"""fp32 on a GPU: as accurate as cuBLAS by default, on TF32 tensor cores when that is allowed."""

from collections.abc import Callable

import moegemm
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = [300, 0, 77, 512, 1, 134]
N, K = 256, 1024


def products() -> dict[str, tuple[Callable[[bool], torch.Tensor], Callable[[torch.dtype], torch.Tensor]]]:
    """Each product by moegemm (with TF32 or without) and by torch in a given dtype."""
    rows = sum(SIZES)
    X, dY = torch.randn(rows, K, device="cuda"), torch.randn(rows, N, device="cuda")
    W = torch.randn(len(SIZES), N, K, device="cuda")
    m_sizes = torch.tensor(SIZES, device="cuda", dtype=torch.int32)

    def by_expert(multiply: Callable[[int, slice], torch.Tensor], stack: bool) -> torch.Tensor:
        ends = torch.tensor(SIZES).cumsum(0).tolist()
        parts = [multiply(e, slice(end - SIZES[e], end)) for e, end in enumerate(ends)]
        return torch.stack(parts) if stack else torch.cat(parts)

    return {
        "forward": (
            lambda tf32: moegemm.grouped_gemm_forward(X, W, 1, m_sizes, allow_tf32=tf32),
            lambda t: by_expert(lambda e, s: X[s].to(t) @ W[e].to(t).T, False),
        ),
        "dX": (
            lambda tf32: moegemm.grouped_gemm_dX(dY, W, None, m_sizes, 1, allow_tf32=tf32),
            lambda t: by_expert(lambda e, s: dY[s].to(t) @ W[e].to(t), False),
        ),
        "dW": (
            lambda tf32: moegemm.grouped_gemm_dW(X, dY, m_sizes, None, 1, allow_tf32=tf32),
            lambda t: by_expert(lambda e, s: dY[s].to(t).T @ X[s].to(t), True),
        ),
    }


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["forward", "dX", "dW"])
def test_fp32_is_within_four_times_the_error_of_cublas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    ours, torchs = products()[name]
    exact = torchs(torch.float64)
    assert error(ours(False), exact) <= 4 * error(torchs(torch.float32), exact)


@pytest.mark.parametrize("name", ["forward", "dX", "dW"])
def test_tf32_rounds_operands_to_the_nearest(name: str) -> None:
    ours, torchs = products()[name]
    exact = torchs(torch.float64)
    # Two roundings to 11 bits, each spread evenly over half a unit: together below 2^-11.
    assert 2**-14 < error(ours(True), exact) < 2**-11
