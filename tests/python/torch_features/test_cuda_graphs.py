"""Capture once, replay with other routing: nothing on the way synchronises or depends on host values."""

import moegemm
import pytest
import torch
from conftest import NO_CUDA
from moegemm.activations import activation_named

pytestmark = NO_CUDA
SWIGLU = activation_named("swiglu", "concatenated", None, None, None).text()


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


class Layers:
    """Two layers of few tokens in a row, whose launches may overlap. The first products take much longer than the
    second ones take to start."""

    def __init__(self, tokens: int, device: str, hidden: int = 2048, inner: int = 256) -> None:
        E, self.topk = 24, 4
        self.x = torch.randn(tokens, hidden, device=device).bfloat16()
        self.gate_up = (torch.randn(E, 2 * inner, hidden, device=device) * hidden**-0.5).bfloat16()
        self.down = (torch.randn(E, hidden, inner, device=device) * inner**-0.5).bfloat16()
        self.ids = torch.empty(tokens, self.topk, device=device, dtype=torch.int64)
        self.weights = torch.rand(tokens, self.topk, device=device)
        self.draw()

    def draw(self) -> None:
        self.ids.copy_(torch.rand(len(self.ids), len(self.down), device=self.ids.device).topk(self.topk).indices)

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            hidden = moegemm.moe_mlp(self.x, self.gate_up, self.down, self.ids, self.weights)
            return moegemm.moe_mlp(hidden, self.gate_up, self.down, self.ids, self.weights)

    def expected(self) -> torch.Tensor:
        """Launch by launch: nothing overlaps."""
        hidden = self.x
        for _ in range(2):
            torch.cuda.synchronize()
            m_sizes, indices = moegemm.route(self.ids, len(self.down))
            torch.cuda.synchronize()
            pre = moegemm.grouped_gemm(hidden, self.gate_up, m_sizes, self.topk, indices, permute_x=True)
            torch.cuda.synchronize()
            act = torch.ops.moegemm.activate(pre, None, m_sizes, SWIGLU)
            torch.cuda.synchronize()
            y = moegemm.grouped_gemm(act, self.down, m_sizes, self.topk, indices, permute_y=True, is_first_gemm=False)
            torch.cuda.synchronize()
            hidden = moegemm.combine(y, self.weights)
        torch.cuda.synchronize()
        return hidden


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("device", ["cuda"])
def test_replays_of_layers_in_a_row_follow_new_routing(device, tokens):
    """No replay waits for the host: the next one begins while the last launches of this one run."""
    layers = Layers(tokens, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layers.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers.run()
    results, drawn = [], []
    for _ in range(20):
        layers.draw()
        drawn.append(layers.ids.clone())
        graph.replay()
        results.append(out.clone())
    for ids, result in zip(drawn, results, strict=True):
        layers.ids.copy_(ids)
        assert torch.equal(result, layers.expected())


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("device", ["cuda"])
def test_layers_in_a_row_share_their_memory_in_order(device, tokens):
    """Eager calls reuse freed memory and one tile counter for each stream, launch after launch."""
    layers = Layers(tokens, device)
    results, drawn = [], []
    for _ in range(20):
        layers.draw()
        drawn.append(layers.ids.clone())
        results.append(layers.run())
    for ids, result in zip(drawn, results, strict=True):
        layers.ids.copy_(ids)
        assert torch.equal(result, layers.expected())


@pytest.mark.parametrize("device", ["cuda"])
def test_second_weights_that_are_copied_first_are_read_after_their_copy(device):
    layers = Layers(1, device, hidden=512, inner=2048)
    expected = layers.expected()
    spread = torch.stack([layers.down, torch.full_like(layers.down, float("nan"))], dim=-1)
    layers.down = spread[..., 0]  # every other element: no kernel walks such rows
    for _ in range(20):
        poison = torch.full_like(spread, float("nan"))
        del poison  # what the copy goes into
        assert torch.equal(layers.run(), expected)
