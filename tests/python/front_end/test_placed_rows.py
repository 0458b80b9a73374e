"""Segments that do not follow one another, and rows outside every segment."""

import moegemm
import pytest
import torch
from conftest import NO_CUDA
from torch import Tensor

SIZES = [20, 0, 33, 7]
LAYOUTS = {"gapped": [0, 24, 32, 72], "any order": [60, 3, 20, 100], "masked": [0, 40, 80, 120]}
ROWS, K, N = 160, 40, 24


class Placed:
    """Random rows in segments, NaN everywhere else, and the same rows packed."""

    def __init__(self, device: str, starts: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.sizes = torch.tensor(SIZES, dtype=torch.int32, device=device)
        self.starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.inside = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, SIZES, strict=True)]).to(device)
        self.outside = torch.ones(ROWS, dtype=torch.bool, device=device)
        self.outside[self.inside] = False
        self.W = torch.randn(len(SIZES), N, K, device=device).to(dtype)
        self.X, self.packed_X = self.rows(K)
        self.dY, self.packed_dY = self.rows(N)

    def rows(self, columns: int) -> tuple[Tensor, Tensor]:
        packed = torch.randn(len(self.inside), columns, device=self.W.device).to(self.W.dtype)
        spread = torch.full((ROWS, columns), float("nan"), device=packed.device, dtype=packed.dtype)
        spread[self.inside] = packed
        return spread, packed


@pytest.fixture(params=LAYOUTS)
def placed(request, device) -> Placed:
    return Placed(device, LAYOUTS[request.param])


def test_products_of_placed_rows_have_the_bits_of_packed_ones_and_zeros_elsewhere(placed):
    p = placed
    Y = moegemm.grouped_gemm_forward(p.X, p.W, 1, p.sizes, starts=p.starts)
    dX = moegemm.grouped_gemm_dX(p.dY, p.W, None, p.sizes, 1, starts=p.starts)
    dW = moegemm.grouped_gemm_dW(p.X, p.dY, p.sizes, None, 1, starts=p.starts)
    assert torch.equal(Y[p.inside], moegemm.grouped_gemm_forward(p.packed_X, p.W, 1, p.sizes))
    assert torch.equal(dX[p.inside], moegemm.grouped_gemm_dX(p.packed_dY, p.W, None, p.sizes, 1))
    assert torch.equal(dW, moegemm.grouped_gemm_dW(p.packed_X, p.packed_dY, p.sizes, None, 1))
    assert not Y[p.outside].any()
    assert not dX[p.outside].any()


def test_undefined_tails_are_left_alone(placed):
    p = placed
    Y, dX = (torch.full((ROWS, columns), 7.0, device=p.W.device, dtype=p.W.dtype) for columns in (N, K))
    moegemm.grouped_gemm_forward(p.X, p.W, 1, p.sizes, starts=p.starts, tails="undefined", out=Y)
    moegemm.grouped_gemm_dX(p.dY, p.W, None, p.sizes, 1, starts=p.starts, tails="undefined", out=dX)
    for out in (Y, dX):
        assert (out[p.outside] == 7).all()
        assert out[p.inside].isfinite().all()


def test_packed_tails_may_be_undefined_too(device):
    p = Placed(device, LAYOUTS["gapped"])
    out = torch.full((ROWS, N), 7.0, device=device, dtype=p.W.dtype)
    X = torch.cat((p.packed_X, torch.full((ROWS - len(p.packed_X), K), float("nan"), device=device).to(p.W.dtype)))
    moegemm.grouped_gemm_forward(X, p.W, 1, p.sizes, tails="undefined", expected_rows=60, out=out)
    assert torch.equal(out[:60], moegemm.grouped_gemm_forward(p.packed_X, p.W, 1, p.sizes))
    assert (out[60:] == 7).all()


def test_gradients_of_placed_rows_are_those_of_packed_ones(placed):
    p = placed
    X, W = p.X.nan_to_num(1e4).requires_grad_(), p.W.clone().requires_grad_()
    moegemm.grouped_gemm(X, W, p.sizes, 1, starts=p.starts)[p.inside].backward(p.packed_dY)
    packed_X, packed_W = p.packed_X.clone().requires_grad_(), p.W.clone().requires_grad_()
    moegemm.grouped_gemm(packed_X, packed_W, p.sizes, 1).backward(p.packed_dY)
    assert torch.equal(X.grad[p.inside], packed_X.grad)
    assert not X.grad[p.outside].any()
    assert torch.equal(W.grad, packed_W.grad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cumulative_ends_say_the_same_as_sizes(device, dtype):
    p = Placed(device, LAYOUTS["gapped"])
    ends = p.sizes.cumsum(0).to(dtype)[None]
    assert torch.equal(
        moegemm.grouped_gemm(p.packed_X, p.W, ends, 1), moegemm.grouped_gemm(p.packed_X, p.W, p.sizes, 1)
    )


def test_gathered_and_scattered_placed_rows(placed):
    """permute_x reads tokens and permute_y stores flat rows through indices at the places of the segments."""
    p = placed
    indices = torch.full((ROWS,), -5, dtype=torch.int32, device=p.W.device)
    order = torch.randperm(len(p.inside), device=p.W.device).int()
    indices[p.inside] = order
    tokens = torch.randn(len(p.inside) // 2, K, device=p.W.device).to(p.W.dtype)
    got = moegemm.grouped_gemm_forward(tokens, p.W, 2, p.sizes, indices, permute_x=True, starts=p.starts)
    packed = moegemm.grouped_gemm_forward(tokens, p.W, 2, p.sizes, order, permute_x=True)
    assert torch.equal(got[p.inside], packed)
    assert not got[p.outside].any()
    flat = moegemm.grouped_gemm_forward(p.X, p.W, 1, p.sizes, indices, permute_y=True, starts=p.starts)
    assert torch.equal(
        flat[: len(order)], moegemm.grouped_gemm_forward(p.packed_X, p.W, 1, p.sizes, order, permute_y=True)
    )
    assert not flat[len(order) :].any()


def test_overlapping_segments_store_rows_of_their_owners(device):
    sizes, starts = (torch.tensor(v, device=device) for v in ([10, 10], [0, 5]))
    X, W = torch.randn(20, 16, device=device), torch.randn(2, 8, 16, device=device)
    Y = moegemm.grouped_gemm(X, W, sizes, 1, starts=starts)
    first, second = X @ W[0].T, X @ W[1].T
    assert torch.allclose(Y[:5], first[:5], atol=1e-4)
    assert torch.allclose(Y[10:15], second[10:15], atol=1e-4)
    shared = Y[5:10]
    assert ((shared - first[5:10]).abs() < 1e-4).logical_or((shared - second[5:10]).abs() < 1e-4).all()
    assert not Y[15:].any()
    with pytest.raises(ValueError, match="rows of expert 1 begin at 5, inside those of expert 0"):
        moegemm.grouped_gemm(X, W, sizes, 1, starts=starts, check=True)


def test_check_names_segments_outside_the_rows(device):
    sizes, starts = (torch.tensor(v, device=device) for v in ([10, 10], [0, 15]))
    X, W = torch.randn(20, 16, device=device), torch.randn(2, 8, 16, device=device)
    with pytest.raises(ValueError, match=r"rows of expert 1 are 15 to 25; they must be in \[0, M\) with M = 20"):
        moegemm.grouped_gemm(X, W, sizes, 1, starts=starts, check=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"starts": torch.zeros(3, dtype=torch.int32)}, "starts is .*3.*must have shape, dtype and device of m_sizes"),
        ({"starts": torch.zeros(4, dtype=torch.int64)}, "starts is .*int64.*must have shape, dtype and device"),
        ({"tails": "nothing"}, "tails is 'nothing'; accepted are 'zero' and 'undefined'"),
        ({"expected_rows": -1}, "expected_rows is -1; it must not be negative"),
        ({"expected_rows": 1.5}, "expected_rows is 1.5; an int is accepted"),
        ({"expected_rows": 2**64}, f"expected_rows is {2**64}; a whole number below 2.63 is accepted"),
    ],
)
def test_wrong_layouts_are_refused(arguments, sentence):
    p = Placed("cpu", LAYOUTS["gapped"])
    with pytest.raises((ValueError, TypeError), match=sentence):
        moegemm.grouped_gemm(p.X, p.W, p.sizes, 1, **arguments)


def test_router_weights_need_packed_segments(device):
    p = Placed(device, LAYOUTS["gapped"])
    indices = torch.arange(ROWS, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="fuse_mul_post=True with starts"):
        moegemm.grouped_gemm(
            p.X, p.W, p.sizes, 1, indices, permute_y=True, topk_weights=torch.ones(ROWS, device=device),
            fuse_mul_post=True, is_first_gemm=False, starts=p.starts,
        )  # fmt: skip


def test_compiled_products_of_placed_rows(placed):
    p = placed

    def product(X: Tensor, W: Tensor, sizes: Tensor, starts: Tensor) -> Tensor:
        return moegemm.grouped_gemm(X, W, sizes, 1, starts=starts)

    compiled = torch.compile(product, fullgraph=True)
    assert torch.equal(compiled(p.X, p.W, p.sizes, p.starts), product(p.X, p.W, p.sizes, p.starts))


@NO_CUDA
def test_graph_replays_with_other_places():
    p = Placed("cuda", LAYOUTS["gapped"])
    out = torch.empty(ROWS, N, device="cuda", dtype=p.W.dtype)
    call = lambda: moegemm.grouped_gemm_forward(p.X, p.W, 1, p.sizes, starts=p.starts, out=out)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    other = Placed("cuda", LAYOUTS["any order"])
    for name in ("X", "W", "starts"):
        getattr(p, name).copy_(getattr(other, name))
    graph.replay()
    expected = moegemm.grouped_gemm_forward(other.packed_X, other.W, 1, other.sizes)
    assert torch.equal(out[other.inside], expected)
    assert not out[other.outside].any()
