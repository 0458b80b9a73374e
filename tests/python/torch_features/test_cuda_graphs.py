"""Capture once, replay with other routing: nothing on the way synchronises or depends on host values."""

import moegemm
import pytest
import torch
from conftest import NO_CUDA

pytestmark = NO_CUDA


@pytest.mark.parametrize("device", ["cuda"])
def test_a_captured_training_step_follows_new_routing(device):
    T, E, K, N, topk = 64, 8, 128, 256, 2
    x = torch.randn(T, K, device=device).bfloat16().requires_grad_()
    W1 = (torch.randn(E, N, K, device=device) * K**-0.5).bfloat16().requires_grad_()
    W2 = (torch.randn(E, K, N, device=device) * N**-0.5).bfloat16().requires_grad_()
    weights = torch.rand(T, topk, device=device).requires_grad_()
    ids = torch.randint(E, (T, topk), device=device)
    leaves = [x, W1, W2, weights]

    def step() -> list[torch.Tensor]:
        m_sizes, gather_indices = moegemm.route(ids, E)
        h = moegemm.grouped_gemm(x, W1, m_sizes, topk, gather_indices, permute_x=True).relu()
        y = moegemm.grouped_gemm(
            h, W2, m_sizes, topk, gather_indices, permute_y=True, topk_weights=weights, fuse_mul_post=True,
            is_first_gemm=False,
        )  # fmt: skip
        out = moegemm.combine(y, topk=topk)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        ids.copy_(torch.randint(E, (T, topk), device=device))
        graph.replay()
        for mine, theirs in zip(captured, step(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("device", ["cuda"])
def test_the_current_stream_is_used(device):
    X = torch.randn(4096, 512, device=device).bfloat16()
    W = torch.randn(4, 512, 512, device=device).bfloat16()
    m_sizes = torch.full((4,), 1024, device=device)
    expected = moegemm.grouped_gemm(X, W, m_sizes, 1)
    torch.cuda.synchronize()
    late = torch.zeros_like(X)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(X)
        got = moegemm.grouped_gemm(late, W, m_sizes, 1)
    side.synchronize()
    assert torch.equal(got, expected)
