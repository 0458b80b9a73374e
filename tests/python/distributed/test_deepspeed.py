"""DeepSpeed AutoEP's experts on moegemm beside their own code, ZeRO around the layer, and axolotl's entry."""

import gc
import os
import socket
import types
import weakref

import moegemm
import pytest
import torch
from distributed.test_sharding import batch, model, part_of, train
from moegemm.integrations import axolotl, deepspeed
from moegemm.integrations.notices import unsaid
from tiny_models import build, experts_of, routing


@pytest.fixture
def experts_module():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    module = pytest.importorskip("deepspeed.moe.ep_experts", reason="this deepspeed has no AutoEP")
    yield module
    deepspeed.use_own()


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "swiglu_clamped", "swiglu_oai"])
def test_experts_of_autoep_are_deepspeeds(experts_module, activation):
    experts = experts_module.GroupedExperts(16, 24, 4, use_grouped_mm=False, activation=activation)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    x, counts = torch.randn(11, 16) * 3, torch.tensor([4, 0, 5, 2])

    def run() -> list[torch.Tensor]:
        rows = x.clone().requires_grad_()
        experts.zero_grad()
        out = experts(rows, counts)
        out.square().sum().backward()
        return [out.detach(), rows.grad, *(p.grad.clone() for p in experts.parameters())]

    expected = run()
    deepspeed.use_moegemm()
    for found, want in zip(run(), expected, strict=True):
        assert (found - want).norm() < 1e-5 * want.norm()


def test_experts_of_releases_without_a_choice_are_swiglu():
    w1, w2, w3 = torch.randn(2, 8, 8), torch.randn(2, 8, 8), torch.randn(2, 8, 8)
    x, counts = torch.randn(5, 8), torch.tensor([2, 3])
    found = deepspeed.grouped_experts_forward(types.SimpleNamespace(w1=w1, w2=w2, w3=w3), x, counts)
    assert torch.equal(found, moegemm.experts_mlp(x, (w1, w3), w2, counts))


def test_an_activation_of_others_runs_deepspeeds_own_code(experts_module):
    name = "of_this_test"
    if name not in experts_module.EXPERT_ACTIVATIONS:
        experts_module.register_expert_activation(name, lambda gate, up, alpha, limit: gate.sin() * up)
    experts = experts_module.GroupedExperts(8, 8, 2, use_grouped_mm=False, activation=name)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    x, counts = torch.randn(5, 8), torch.tensor([2, 3])
    expected = experts(x, counts)
    deepspeed.use_moegemm()
    assert torch.equal(experts(x, counts), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_no_gathered_weight_is_kept_for_the_backward(transposed):
    """ZeRO-3 gathers a parameter for the forward, swaps its data for nothing, and gathers it again for the backward."""
    shapes = ((4, 8, 12), (4, 6, 8)) if transposed else ((4, 12, 8), (4, 8, 6))
    values = [torch.randn(shape) for shape in shapes]
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in shapes]
    x, ids = torch.randn(9, 8, requires_grad=True), torch.randint(4, (9, 2))
    storages = []
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.clone()
        storages.append(weakref.ref(parameter.untyped_storage()))
    out = moegemm.moe_mlp(x, *parameters, ids, torch.rand(9, 2), transposed=transposed)
    before = [parameter.data_ptr() for parameter in parameters]
    for parameter in parameters:
        parameter.data = torch.empty(0)
    gc.collect()
    saved = [t for t in saved_tensors(out) if t.data_ptr() in before]
    assert not saved, [list(t.shape) for t in saved]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.clone()
    out.sum().backward()
    assert all(parameter.grad.shape == value.shape for parameter, value in zip(parameters, values, strict=True))


def saved_tensors(out: torch.Tensor) -> list[torch.Tensor]:
    """What the graph of a result keeps."""
    found, waiting, seen = [], [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [t for t in getattr(node, "saved_tensors", ()) if t is not None]
        waiting += [following for following, _ in node.next_functions]
    return found


def with_zero(stage: int, port: int) -> list[float]:
    """Losses of this rank in three clipped steps of DeepSpeed's engine around our layer."""
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_PORT=str(port))
    import deepspeed as engine_of

    layers = model()
    configuration = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    engine, *_ = engine_of.initialize(model=layers, optimizer=optimizer, config=configuration, dist_init_required=False)
    losses = []
    for step in range(3):
        loss = engine(part_of(batch(step))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_around_the_layer_trains_as_one_process(ranks, stage):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = ranks(2).run(with_zero, stage, port)
    expected = [float(loss) for loss in train(model(), 3, lambda x: x)]
    found = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert found == pytest.approx(expected, rel=1e-4)


def test_axolotls_entry_sums_the_experts_of_this_rank():
    experts = experts_of(build("qwen3_moe", "eager"))
    ids, weights = routing(6)
    x = torch.randn(40, 32)
    table: dict = {}
    axolotl.register(table)
    found = table["moegemm"](experts, x, torch.where(ids < 4, ids, -1), weights)
    expected = moegemm.moe_mlp(x, experts.gate_up_proj, experts.down_proj, torch.where(ids < 4, ids, -1), weights)
    assert torch.allclose(found, expected, atol=1e-6)


def test_axolotls_entry_keeps_the_norm_after_the_experts():
    experts = experts_of(build("qwen3_moe", "eager"))
    experts.has_post_expert_norm, experts.post_expert_norm = True, torch.nn.RMSNorm(32)
    ids, weights = routing(6)
    x, ids = torch.randn(40, 32), torch.where(ids < 4, ids, -1)
    expected = torch.zeros_like(x)
    for slot in range(ids.size(1)):
        for token in (ids[:, slot] >= 0).nonzero().flatten().tolist():
            expert = ids[token, slot]
            h = experts._apply_gate(experts.gate_up_proj[expert] @ x[token])
            expected[token] += weights[token, slot] * experts.post_expert_norm(experts.down_proj[expert] @ h)
    with unsaid():  # that torch runs the norm
        found = axolotl.local_kernel(experts, x, ids, weights)
    assert torch.allclose(found, expected, atol=1e-5)


def test_axolotls_entry_takes_biases_in_another_dtype():
    experts = experts_of(build("gpt_oss", "eager")).bfloat16()
    ids, weights = routing(experts.num_experts)
    x = torch.randn(40, 32).bfloat16()
    expected = axolotl.local_kernel(experts, x, ids, weights)
    experts.down_proj_bias.data = experts.down_proj_bias.data.float()
    assert torch.equal(axolotl.local_kernel(experts, x, ids, weights), expected)


def test_axolotls_entry_says_which_weights_it_does_not_take():
    experts = experts_of(build("qwen3_moe", "eager")).double()
    ids, weights = routing(6)
    with pytest.raises(
        ValueError, match=r"Experts cannot run on moegemm: the first product's weights are torch\.float64"
    ):
        axolotl.local_kernel(experts, torch.randn(40, 32), ids, weights)
