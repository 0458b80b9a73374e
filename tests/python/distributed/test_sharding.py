"""Experts as DTensors: shards, gradients, FSDP, checkpoints. Every test compares with one process."""

import copy

import moegemm
import pytest
import torch
import torch.distributed as dist
from counted import Counted
from distributed.cases import BY_NAME, build, leaf
from distributed.test_bits import bits
from distributed.test_dispatchers import refusal
from moegemm.distributed import clip_grad_norm_, expert_parallel_mlp, shard_experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class Experts(nn.Module):
    """Stacks of experts. With a mesh they are spread over that."""

    def __init__(self, experts: int = 8, hidden: int = 16, inner: int = 12) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(3)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden, generator=random) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner, generator=random) * 0.3)
        self.mesh = None
        self.gradient_scale = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return moegemm.moe_mlp(x, self.gate_up_proj, self.down_proj, ids, weights)
        return expert_parallel_mlp(
            x, self.gate_up_proj, self.down_proj, ids, weights, mesh=self.mesh, gradient_scale=self.gradient_scale
        )


class Layer(nn.Module):
    """A router and its experts, with a shortcut around both."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 16, generator=torch.Generator().manual_seed(4)) * scale)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = (x @ self.router.T).float().softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)


def model(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Layer(1 + number) for number in range(layers)))


def batch(step: int, tokens: int = 24) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(100 + step))


def part_of(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def spread(layers: nn.Sequential, mesh) -> nn.Sequential:
    for layer in layers:
        shard_experts(layer, mesh)
        layer.experts.mesh = mesh
    return layers


def shapes_and_gradients() -> list[str]:
    """What is wrong with sharded parameters and their gradients on this rank."""
    wrong = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, parts = model(1), spread(model(1), mesh)
    names = {name: p.shape for name, p in whole.named_parameters()}
    if names != {name: p.shape for name, p in parts.named_parameters()}:
        wrong.append("names or global shapes changed")
    parameter = parts[0].experts.gate_up_proj
    if parameter.to_local().untyped_storage().nbytes() * dist.get_world_size() != whole[0].experts.gate_up_proj.nbytes:
        wrong.append("a shard keeps the memory of all")
    x = batch(0)
    whole(x).square().sum().backward()
    out = parts(part_of(x))
    out.square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        gradient = getattr(parts[0].experts, name).grad
        if not isinstance(gradient, DTensor) or gradient.placements != (Shard(0),):
            wrong.append(f"the gradient of {name} is {type(gradient).__name__}")
        elif not torch.equal(bits(gradient.full_tensor()), bits(getattr(whole[0].experts, name).grad)):
            wrong.append(f"the gradient of {name} has other bits")
    ids = torch.zeros(len(part_of(x)), 1, dtype=torch.int64)
    inferred = expert_parallel_mlp(part_of(x), parts[0].experts.gate_up_proj, parts[0].experts.down_proj, ids, None)
    if inferred.shape != part_of(x).shape:
        wrong.append("the mesh of DTensors was not found")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_experts_keep_names_and_give_sharded_gradients(ranks, size):
    assert ranks(size).run(shapes_and_gradients) == [[]] * size


def adapters() -> list[str]:
    """LoraAdapters that were sharded with their experts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    experts = Experts()
    experts.first, experts.second = moegemm.LoraAdapter(8, 16, 24, rank=2), moegemm.LoraAdapter(8, 12, 16, rank=2)
    with torch.no_grad():
        experts.first.B.normal_(), experts.second.B.normal_()
    whole = copy.deepcopy(experts)
    shard_experts(experts, mesh)
    x = batch(0)
    ids = torch.randint(8, (len(x), 2), generator=torch.Generator().manual_seed(1))
    moegemm.lora_moe_mlp(x, whole.gate_up_proj, whole.down_proj, ids, None, whole.first, whole.second).sum().backward()
    out = expert_parallel_mlp(
        part_of(x), experts.gate_up_proj, experts.down_proj, part_of(ids), None, gate_up=experts.first,
        down=experts.second,
    )  # fmt: skip
    out.sum().backward()
    return [
        name
        for (name, a), b in zip(experts.named_parameters(), whole.parameters(), strict=True)
        if not torch.equal(bits(whole_of(a.grad)), bits(b.grad))
    ]


def test_sharded_adapters_get_the_gradients_of_one_process(ranks):
    assert ranks(2).run(adapters) == [[], []]


def shared_parameters() -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = nn.ModuleList([Experts(), Experts()])
    layers[1].gate_up_proj = layers[0].gate_up_proj
    shard_experts(layers, mesh)
    first, second = layers
    return [first.gate_up_proj is second.gate_up_proj, first.down_proj is second.down_proj]


def test_a_parameter_of_two_layers_stays_one(ranks):
    assert ranks(2).run(shared_parameters) == [[True, False]] * 2


def refusals() -> dict[str, str]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    two = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "ep"))
    layer = build(BY_NAME["random"], size, torch.float32)
    told = {}
    for name, placement in {"columns": Shard(1), "partial": Partial()}.items():
        w = distribute_tensor(layer.w_gate_up, mesh, [Shard(1)]) if name == "columns" else DTensor.from_local(
            layer.w_gate_up, mesh, [placement]
        )  # fmt: skip
        told[name] = refusal(lambda w=w: moegemm.moe_mlp(layer.x, w, layer.w_down, layer.ids, None))
    told["mesh"] = refusal(lambda: shard_experts(Experts(), two))
    told["experts"] = refusal(lambda: shard_experts(Experts(experts=7), mesh))
    told["nothing"] = refusal(lambda: shard_experts(nn.Linear(3, 3), mesh))
    told["again"] = refusal(lambda: shard_experts(shard_experts(Experts(), mesh), mesh))
    return told


def test_unsupported_placements_and_meshes_are_refused_with_a_sentence(ranks):
    for told in ranks(2).run(refusals):
        assert "w_gate_up is a DTensor with placements (Shard(dim=1),); accepted are Shard(0)" in told["columns"]
        assert "accepted are Shard(0)" in told["partial"]
        assert "a DeviceMesh with one dimension is accepted" in told["mesh"]
        assert "its 7 experts must be a multiple of the 2 ranks" in told["experts"]
        assert "Linear has no parameter called gate_up_proj" in told["nothing"]
        assert "gate_up_proj is a DTensor already" in told["again"]


def sharded_product() -> bool:
    """grouped_gemm with a DTensor of experts: this rank's product, and a gradient that is sharded as the weight is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = build(BY_NAME["random"], dist.get_world_size(), torch.float32)
    w = distribute_tensor(layer.w_gate_up, mesh, [Shard(0)]).requires_grad_()
    mine = layer.w_gate_up[layer.experts_of(dist.get_rank())].clone().requires_grad_()
    rows, sizes = layer.x[:8], torch.full((mine.size(0),), 8 // mine.size(0))
    out, expected = moegemm.grouped_gemm(rows, w, sizes, 1), moegemm.grouped_gemm(rows, mine, sizes, 1)
    out.sum().backward()
    expected.sum().backward()
    same = torch.equal(out, expected) and torch.equal(w.grad.to_local(), mine.grad)
    return same and w.grad.placements == (Shard(0),)


def test_a_product_takes_sharded_experts(ranks):
    assert ranks(2).run(sharded_product) == [True, True]


def replicated() -> bool:
    """A weight that every rank has whole: its gradient is the sum over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = build(BY_NAME["random"], dist.get_world_size(), torch.float32)
    mine = layer.tokens_of(dist.get_rank())
    w = distribute_tensor(layer.w_gate_up, mesh, [Replicate()]).requires_grad_()
    out = moegemm.moe_mlp(layer.x[mine], w, layer.w_down, layer.ids[mine], layer.router_weights[mine])
    out.backward(layer.d_out[mine])
    whole = leaf(layer.w_gate_up)
    moegemm.moe_mlp(layer.x, whole, layer.w_down, layer.ids, layer.router_weights).backward(layer.d_out)
    return torch.allclose(w.grad.full_tensor(), whole.grad, atol=1e-5)


def test_a_replicated_weight_gets_the_sum_of_the_ranks_gradients(ranks):
    assert ranks(2).run(replicated) == [True, True]


def train(layers: nn.Module, steps: int, take, clip: float | None = 0.5) -> list[float]:
    """Losses of a few AdamW steps. The loss is a mean over all tokens; `take` picks a rank's."""
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(steps):
        x = batch(step)
        loss = layers(take(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            clip_grad_norm_(layers.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mean_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    together = torch.stack(losses)
    dist.all_reduce(together)
    return (together / dist.get_world_size()).tolist()


def fsdp(shape: tuple[int, int], mixed: bool, columns: bool) -> float:
    """Five steps with FSDP2 and expert parallelism, and how far losses and weights are from one process."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    everyone = mesh._flatten("all")
    expected_model, layers = model(), model()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    if shape[1] > 1:
        spread(layers, mesh["ep"])
    for layer in layers:
        # FSDP averages the experts' gradients over "dp" alone; over "ep" they are sums already.
        layer.experts.gradient_scale = 1.0 / shape[1]
        fully_shard(
            layer.experts, mesh=mesh["dp"], mp_policy=policy,
            shard_placement_fn=(lambda p: Shard(1)) if columns else None,
        )  # fmt: skip
        fully_shard(layer, mesh=everyone, mp_policy=policy)
    expected = train(expected_model, 5, lambda x: x)
    found = mean_over_ranks(train(layers, 5, part_of))
    errors = [abs(a - float(b)) / abs(float(b)) for a, b in zip(found, expected, strict=True)]
    for (name, got), want in zip(layers.named_parameters(), expected_model.parameters(), strict=True):
        errors.append(float((whole_of(got) - want.detach()).norm() / want.detach().norm()))
        assert got.grad is not None, name
    return max(errors)


@pytest.mark.parametrize("columns", [False, True], ids=["along experts", "along columns"])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=["fsdp 4", "fsdp 2 x ep 2"])
def test_five_clipped_steps_with_fsdp_are_those_of_one_process(ranks, shape, columns):
    """Not bitwise: FSDP sums gradients of ranks in another order than one process sums tokens."""
    assert max(ranks(4).run(fsdp, shape, False, columns)) < 2e-5


def test_mixed_precision_of_fsdp_trains(ranks):
    assert max(ranks(4).run(fsdp, (2, 2), True, False)) < 0.05


def ddp() -> float:
    expected_model, layers = model(), model()
    wrapped = nn.parallel.DistributedDataParallel(layers)
    expected = train(expected_model, 3, lambda x: x)
    found = mean_over_ranks(train(wrapped, 3, part_of))
    errors = [abs(a - float(b)) / abs(float(b)) for a, b in zip(found, expected, strict=True)]
    for got, want in zip(layers.parameters(), expected_model.parameters(), strict=True):
        errors.append(float((got.detach() - want.detach()).norm() / want.detach().norm()))
    return max(errors)


def test_ddp_trains_as_one_process(ranks):
    assert max(ranks(2).run(ddp)) < 2e-5


def no_tokens_for_some() -> bool:
    """All tokens of all ranks go to one expert: all others' weights get zeros, none gets nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = spread(model(1), mesh)
    x = part_of(batch(0))
    layers[0].experts(x, torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1)).sum().backward()
    gradients = [p.grad for p in layers[0].experts.parameters()]
    if any(g is None for g in gradients):
        return False
    return all(bool(g.to_local().any()) == (dist.get_rank() == 0) for g in gradients)


def test_experts_without_tokens_get_gradients_of_zeros(ranks):
    assert ranks(4).run(no_tokens_for_some) == [True] * 4


def save(folder: str, ranks_of_experts: int) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": spread_over(ranks_of_experts).state_dict()}, checkpoint_id=folder)


def spread_over(count: int) -> nn.Sequential:
    """A model whose experts are on `count` of the ranks of each group of so many; 1: whole on every rank."""
    if count == 1:
        return model()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // count, count), mesh_dim_names=("dp", "ep"))
    return spread(model(), mesh["ep"])


def load(folder: str, ranks_of_experts: int) -> bool:
    import torch.distributed.checkpoint as dcp

    layers = spread_over(ranks_of_experts)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.zero_()
    state = {"model": layers.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    layers.load_state_dict(state["model"])
    pairs = zip(layers.parameters(), model().parameters(), strict=True)
    return all(torch.equal(whole_of(got), want.detach()) for got, want in pairs)


def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_four(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), 2)
    for size, spread_to in ((2, 1), (4, 4), (4, 2)):
        assert ranks(size).run(load, str(tmp_path), spread_to) == [True] * size


def checkpointed(keep: str | None) -> list[str]:
    """Activation checkpointing: which gradients have other bits, and which products were run again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, again = spread(model(1), mesh), spread(model(1), mesh)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    x = part_of(batch(0))
    plain(x).square().sum().backward()
    options = {}
    if keep is not None:
        kept = moegemm.distributed.checkpoint_ops(keep)

        def policy(ctx, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    out = checkpoint(again, x, use_reentrant=False, **options)
    with Counted() as ran:
        out.square().sum().backward()
    wrong = [
        name
        for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True)
        if not torch.equal(bits(whole_of(a.grad)), bits(whole_of(b.grad)))
    ]
    products = 0 if keep == "products" else 2
    return wrong if ran.counts["forward"] == products else [*wrong, f"{ran.counts} products in the backward"]


@pytest.mark.parametrize("keep", [None, "products", "routing"])
def test_activations_that_are_computed_again_have_the_same_bits(ranks, keep):
    assert ranks(2).run(checkpointed, keep) == [[], []]


def test_one_parameter_is_clipped_as_a_list_of_it():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_(parameter, 1.5) == 6.0
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.75))
