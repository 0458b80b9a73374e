"""Groups of 64 and 512 ranks that exist on paper: shapes, shards and memory of large models on one of them."""

import moegemm
import pytest
import torch
import torch.distributed as dist
from moegemm.distributed import AllToAll, expert_parallel_mlp, shard_experts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

MODELS = {  # experts, topk, hidden, intermediate, as published
    "deepseek-v3": (256, 8, 7168, 2048),
    "kimi-k2": (384, 8, 7168, 2048),
}


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

    yield start
    dist.destroy_process_group()


class Experts(nn.Module):
    """Stacks of a large model, without memory."""

    def __init__(self, model: str) -> None:
        super().__init__()
        experts, _, hidden, inner = MODELS[model]
        options = {"device": "meta", "dtype": torch.bfloat16}
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden, **options))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner, **options))


@pytest.mark.parametrize(("model", "ranks", "spread"), [
    ("deepseek-v3", 64, 64), ("deepseek-v3", 512, 256), ("kimi-k2", 64, 64), ("kimi-k2", 512, 128),
])  # fmt: skip
def test_shards_of_large_models_have_the_right_shapes_and_bytes(group, model, ranks, spread):
    group(ranks, rank=ranks - 1)
    mesh = init_device_mesh("cpu", (ranks // spread, spread), mesh_dim_names=("dp", "ep"))
    experts, _, hidden, inner = MODELS[model]
    layer = shard_experts(Experts(model), mesh["ep"])
    here = experts // spread
    assert layer.gate_up_proj.shape == (experts, 2 * inner, hidden)
    assert layer.gate_up_proj.to_local().shape == (here, 2 * inner, hidden)
    assert layer.down_proj.to_local().shape == (here, hidden, inner)
    assert sum(p.to_local().nbytes for p in layer.parameters()) == here * 3 * hidden * inner * 2
    assert all(p.is_meta for p in layer.parameters())


def test_ranks_that_do_not_divide_the_experts_are_refused(group):
    group(512)
    mesh = init_device_mesh("cpu", (512,))
    with pytest.raises(ValueError, match="its 384 experts must be a multiple of the 512 ranks"):
        shard_experts(Experts("kimi-k2"), mesh)
    with pytest.raises(ValueError, match="num_experts is 384; it must be a multiple of the 512 ranks"):
        AllToAll(mesh, 384)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most rows of a tensor with `columns` columns that any operator makes."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.size(1) == self.columns:
                self.rows = max(self.rows, tensor.size(0))
        return made


@pytest.mark.parametrize(("model", "ranks"), [("deepseek-v3", 64), ("deepseek-v3", 256), ("kimi-k2", 128)])
def test_a_layer_with_room_for_each_peer_has_static_shapes_forward_and_backward(group, model, ranks):
    experts, topk, hidden, inner = MODELS[model]
    group(ranks)
    tokens, here = 4096, experts // ranks
    room = 2 * tokens * topk // ranks  # twice what comes when routing is even
    dispatcher = AllToAll(None, experts, rows_per_peer=room)
    with FakeTensorMode(), Largest(hidden) as largest:
        options = {"dtype": torch.bfloat16, "requires_grad": True}
        x = torch.empty(tokens, hidden, **options)
        gate_up, down = torch.empty(here, 2 * inner, hidden, **options), torch.empty(here, hidden, inner, **options)
        weights = torch.empty(tokens, topk, requires_grad=True)
        ids = torch.zeros(tokens, topk, dtype=torch.int64)
        out = expert_parallel_mlp(x, gate_up, down, ids, weights, dispatcher=dispatcher)
        out.sum().backward()
        assert out.shape == x.grad.shape == x.shape
        assert gate_up.grad.shape == gate_up.shape
        assert weights.grad.shape == weights.shape
    assert largest.rows == ranks * room == 2 * tokens * topk


@pytest.mark.parametrize("unique", [False, True])
def test_a_rank_of_a_fake_group_receives_what_it_sends(group, unique):
    """Sizes that one rank can compute with: what all ranks would do if they did the same."""
    group(64)
    dispatcher = AllToAll(None, 128, unique=unique)
    x, ids = torch.randn(50, 8), torch.rand(50, 128).topk(8).indices
    sent = dispatcher.dispatch(x, ids, torch.rand(50, 8))
    owners = {(token, int(expert) // 2) for token in range(50) for expert in ids[token]}
    assert sent.rows.size(0) == (len(owners) if unique else 400)
    assert dispatcher.combine(sent.rows, sent).shape == x.shape


def test_gradients_that_do_not_go_through_autograd_are_refused_where_they_would_be_wrong(group):
    group(2)
    x, ids, weights = torch.randn(4, 16), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    w_gate_up, w_down = torch.randn(2, 16, 16, requires_grad=True), torch.randn(2, 16, 8, requires_grad=True)
    adapter = moegemm.LoraAdapter(2, 16, 16, rank=4)
    exact, once = AllToAll(None, 4), AllToAll(None, 4, unique=True)

    def call(**options):
        return expert_parallel_mlp(x, w_gate_up, w_down, ids, weights, **options)

    with pytest.raises(ValueError, match="accumulate is given; it needs an AllToAll dispatcher with unique=False"):
        call(dispatcher=once, accumulate=True)
    with pytest.raises(ValueError, match="gradient_scale is given; what goes to main_grad"):
        call(dispatcher=exact, accumulate=True, gradient_scale=0.5)
    with pytest.raises(ValueError, match="adapters are given; with them w_gate_up is one tensor, without accumulate"):
        call(dispatcher=exact, accumulate=True, gate_up=adapter)


def test_all_ranks_are_no_group_before_there_is_one():
    if dist.is_initialized():
        pytest.skip("another test of this process keeps its group")
    with pytest.raises(ValueError, match="group is None and torch"):
        AllToAll(None, 4)
