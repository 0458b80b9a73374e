"""experts_implementation="moegemm": the same logits and gradients as transformers' own implementations."""

import copy
import subprocess
import sys
import warnings
from importlib import import_module

import moegemm
import pytest
import torch
from counted import Counted
from tiny_models import DISPATCHED, FAMILIES, assert_same, build, experts_of, outputs_and_gradients, token_ids

transformers = pytest.importorskip("transformers")
integration = import_module("moegemm.transformers")
running = import_module("moegemm.integrations.expert_modules.experts")
notices = import_module("moegemm.integrations.notices")


def as_moegemm(model: torch.nn.Module) -> torch.nn.Module:
    return moegemm.patch(copy.deepcopy(model))


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_eager(device, family):
    model = build(family, "eager").to(device)
    ids = token_ids().to(device)
    assert_same(outputs_and_gradients(as_moegemm(model), ids), outputs_and_gradients(model, ids), 2e-5)


@pytest.mark.parametrize("family", DISPATCHED)
def test_logits_and_gradients_are_those_of_grouped_mm(device, family):
    model = build(family, "grouped_mm").to(device)
    ids = token_ids().to(device)
    assert_same(outputs_and_gradients(as_moegemm(model), ids), outputs_and_gradients(model, ids), 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_sixteen_bit_models_are_as_close_to_fp32_as_eager(device, family, dtype):
    exact = build(family, "eager").to(device)
    ids = token_ids().to(device)
    # One dense layer of routing decisions in fp32 would differ: compare a single expert layer on the same routing.
    experts = experts_of(exact)
    x = torch.randn(40, 32, device=device)
    weights, chosen = torch.rand(40, 4, device=device).softmax(-1).topk(2)
    with torch.no_grad():
        reference = experts(x.to(dtype).float(), chosen, weights)
        half = copy.deepcopy(experts).to(dtype)
        eager = half(x.to(dtype), chosen, weights)
        mine = integration.experts_forward(half, x.to(dtype), chosen, weights)
    assert mine.dtype == dtype
    error, eager_error = ((out.float() - reference).norm() for out in (mine, eager))
    assert error <= 1.1 * eager_error + 1e-6
    assert outputs_and_gradients(as_moegemm(exact).to(dtype), ids)["logits"].isfinite().all()


@pytest.mark.smoke
@pytest.mark.parametrize("family", DISPATCHED)
def test_is_chosen_by_name(family):
    model = build(family, "moegemm")
    with pytest.MonkeyPatch.context() as patched:
        ran = []
        original = running.moe_mlp
        patched.setattr(running, "moe_mlp", lambda *a, **k: ran.append(1) or original(*a, **k))
        model(input_ids=token_ids())
    assert ran, "the fused layer did not run"


def test_every_tested_family_has_a_kernel_for_its_activation():
    for family in FAMILIES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            as_moegemm(build(family, "eager"))(input_ids=token_ids())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing(device, family):
    ids = token_ids().to(device)
    plain = as_moegemm(build(family, "eager").to(device)).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(outputs_and_gradients(checkpointed, ids), outputs_and_gradients(plain, ids), 1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_expert_layers_compile_as_one_graph(device, family):
    torch._dynamo.reset()
    model = build(family, "moegemm").to(device)
    experts = experts_of(model)
    x = torch.randn(40, 32, device=device)
    weights, ids = torch.rand(40, 4, device=device).softmax(-1).topk(2)

    def gradients(run) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = run(leaf, ids, weights)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, *experts.parameters()])]

    # Compiled first: the module is asked for its activation while tracing.
    compiled = gradients(torch.compile(experts, fullgraph=True, backend="aot_eager"))
    for mine, expected in zip(compiled, gradients(experts), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_a_whole_model_compiles(device):
    torch._dynamo.reset()
    model = build("qwen3_moe", "moegemm").to(device).eval()
    ids = token_ids().to(device)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
def test_save_and_load(tmp_path):
    model = build("qwen3_moe", "moegemm")
    expected = model(input_ids=token_ids()).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moegemm", attn_implementation="eager"
    )
    assert loaded.config._experts_implementation == "moegemm"
    torch.testing.assert_close(loaded(input_ids=token_ids()).logits, expected, rtol=1e-5, atol=1e-6)
    elsewhere = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(elsewhere(input_ids=token_ids()).logits, expected, rtol=1e-4, atol=1e-5)


def test_device_map(tmp_path):
    pytest.importorskip("accelerate")
    model = build("qwen3_moe", "moegemm")
    model.save_pretrained(tmp_path)
    placed = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moegemm", attn_implementation="eager", device_map={"": "cpu"}
    )
    torch.testing.assert_close(
        placed(input_ids=token_ids()).logits, model(input_ids=token_ids()).logits, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("frozen", "expected"), [(True, 0), (False, 4)])
def test_frozen_experts_compute_no_weight_gradient(frozen, expected):
    model = build("qwen3_moe", "moegemm")
    for name, parameter in model.named_parameters():
        if "experts" in name:
            parameter.requires_grad_(not frozen)
    loss = model(input_ids=token_ids(), labels=token_ids()).loss
    with Counted() as ran:
        loss.backward()
    assert ran.counts["dw"] == expected
    routers = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert routers
    assert all(p.grad is not None and p.grad.any() for p in routers)


def test_generation(device):
    model = build("qwen3_moe", "eager").to(device).eval()
    ids = token_ids(1, 5).to(device)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(as_moegemm(model).generate(ids, **options), model.generate(ids, **options))


def test_an_unknown_activation_runs_in_torch_and_says_so():
    experts = experts_of(build("gpt_oss", "eager"))
    experts._apply_gate = lambda h: torch.sin(h[..., ::2]) * h[..., 1::2]
    x = torch.randn(20, 32)
    weights, ids = torch.rand(20, 4).softmax(-1).topk(2)
    expected = experts(x, ids, weights)
    notices._said.clear()
    with pytest.warns(UserWarning, match=r"GptOssExperts runs its activation in torch"):
        got = integration.experts_forward(experts, x, ids, weights)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    parameters = list(experts.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.experts_forward(experts, x, ids, weights)  # once is enough


def test_weights_that_no_kernel_takes_fall_back_and_say_so():
    experts = experts_of(build("qwen3_moe", "grouped_mm")).double()
    weights, ids = torch.rand(20, 4).softmax(-1).topk(2)
    notices._said.clear()
    with pytest.warns(UserWarning, match=r"runs its own eager code: .* torch.float64"):
        integration.experts_forward(experts, torch.randn(20, 32).double(), ids, weights)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_slots_of_other_ranks_add_nothing(family):
    experts = experts_of(build(family, "eager"))
    x = torch.randn(20, 32)
    weights, ids = torch.rand(20, 4).softmax(-1).topk(2)
    ids = torch.where(torch.rand(20, 2) < 0.3, experts.num_experts, ids)
    masked = weights * (ids < experts.num_experts)
    expected = integration.experts_forward(experts, x, ids.clamp(max=experts.num_experts - 1), masked)
    torch.testing.assert_close(integration.experts_forward(experts, x, ids, weights), expected)


def test_patch_refuses_a_model_without_experts():
    with pytest.raises(ValueError, match="no expert layer that moegemm knows"):
        moegemm.patch(torch.nn.Linear(2, 2))


class SeparateExperts(torch.nn.Module):
    """A block as transformers 4 had it."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Module() for _ in range(4))
        for expert in self.experts:
            for name in names:
                setattr(expert, name, torch.nn.Linear(8, 8))


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")])
def test_patch_refuses_experts_that_are_modules_of_their_own_with_the_reason(names):
    with pytest.raises(ValueError, match=r"SeparateExperts.experts is a ModuleList of 4 experts .* transformers 5"):
        moegemm.patch(SeparateExperts(names))


def test_patch_leaves_separate_experts_alone_beside_others_and_says_so():
    model = build("qwen3_moe", "eager")
    model.extra = SeparateExperts(("gate_proj", "up_proj", "down_proj"))
    notices._said.clear()
    with pytest.warns(UserWarning, match="runs its own code: SeparateExperts.experts"):
        moegemm.patch(model)


def test_importing_moegemm_does_not_import_transformers():
    code = "import sys, moegemm; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
