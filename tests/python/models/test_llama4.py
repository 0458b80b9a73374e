"""Llama 4 runs through the forward of its experts module, so that whatever is wrapped around it runs."""

import copy
from importlib import import_module

import moegemm
import pytest
import torch
from tiny_models import assert_same, build, experts_of, outputs_and_gradients, randomise_adapters, token_ids

transformers = pytest.importorskip("transformers")
import_module("moegemm.transformers")
llama4 = import_module("moegemm.integrations.expert_modules.llama4")

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Grows with every run of our forward."""
    ran: list[int] = []
    run_as = llama4.run_as
    monkeypatch.setattr(llama4, "run_as", lambda *a: ran.append(1) or run_as(*a))
    return ran


@pytest.mark.smoke
def test_the_name_alone_makes_it_run_on_moegemm(calls):
    expected = outputs_and_gradients(build("llama4", "eager"), token_ids())
    assert not calls
    assert_same(outputs_and_gradients(build("llama4", "moegemm"), token_ids()), expected, 2e-5)
    assert len(calls) == 2


def test_the_name_alone_works_when_a_checkpoint_is_loaded(calls, tmp_path):
    model = build("llama4", "eager")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="moegemm", attn_implementation="eager"
    )
    got = loaded(input_ids=token_ids()).logits
    torch.testing.assert_close(got, model(input_ids=token_ids()).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


def test_hooks_on_the_experts_run(calls):
    model = moegemm.patch(build("llama4", "eager"))
    seen = []
    experts_of(model).register_forward_pre_hook(lambda module, args: seen.append("before"))
    experts_of(model).register_forward_hook(lambda module, args, out: seen.append("after"))
    model(input_ids=token_ids())
    assert seen == ["before", "after"]
    assert len(calls) == 2


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return randomise_adapters(peft.get_peft_model(model, peft.LoraConfig(r=4, target_parameters=TARGETS)), 5, 0.3)


@pytest.mark.parametrize("order", ["patch first", "adapters first", "by name"])
def test_adapters_of_peft_run_in_either_order(calls, order):
    expected = outputs_and_gradients(with_adapters(build("llama4", "eager")), token_ids())
    assert sum("lora_" in name for name in expected) == 8
    if order == "by name":
        model = with_adapters(build("llama4", "moegemm"))
    elif order == "patch first":
        model = with_adapters(moegemm.patch(build("llama4", "eager")))
    else:
        model = moegemm.patch(with_adapters(build("llama4", "eager")))
    assert_same(outputs_and_gradients(model, token_ids()), expected, 5e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("order", ["patched after loading", "by name"])
def test_layers_offloaded_to_disk_give_the_right_logits(calls, tmp_path, order):
    pytest.importorskip("accelerate")
    model = build("llama4", "eager").eval()
    model.save_pretrained(tmp_path / "model")
    options = {"experts_implementation": "moegemm"} if order == "by name" else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", offload_folder=tmp_path / "offload", **options,
        device_map={"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
                    "model.rotary_emb": "cpu", "lm_head": "cpu"},
    )  # fmt: skip
    offloaded = [m for m in loaded.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj.device.type == "meta"]
    assert offloaded
    if order != "by name":
        moegemm.patch(loaded)
    with torch.no_grad():
        got = loaded(input_ids=token_ids()).logits
        torch.testing.assert_close(got, model(input_ids=token_ids()).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2
    assert all(layer.on_moegemm for layer in moegemm.report(loaded).layers)


def test_weights_that_no_kernel_takes_run_the_experts_own_code():
    eager = build("llama4", "eager").double()
    model = moegemm.patch(copy.deepcopy(eager))
    import_module("moegemm.integrations.notices")._said.clear()
    with pytest.warns(UserWarning, match=r"Llama4TextExperts runs its own eager code: .* torch.float64"):
        got = outputs_and_gradients(model, token_ids())
    assert_same(got, outputs_and_gradients(eager, token_ids()), 1e-12)


def test_an_activation_that_no_kernel_has_runs_in_torch_and_says_so():
    eager = build("llama4", "eager")
    for module in eager.modules():
        if hasattr(module, "gate_up_proj"):
            module.act_fn = torch.nn.Tanh()
    import_module("moegemm.integrations.notices")._said.clear()
    with pytest.warns(UserWarning, match="Llama4TextExperts runs its activation in torch"):
        got = outputs_and_gradients(moegemm.patch(copy.deepcopy(eager)), token_ids())
    assert_same(got, outputs_and_gradients(eager, token_ids()), 5e-5)


def test_a_forward_that_was_replaced_is_refused_with_the_reason():
    model = build("llama4", "eager")
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            own = module.forward
            module.forward = lambda rows, own=own: own(rows)
    with pytest.raises(ValueError, match=r"Llama4TextExperts: its forward was replaced by .*lambda.*patch before"):
        moegemm.patch(model)


@pytest.mark.smoke
def test_the_block_compiles_as_one_graph():
    torch._dynamo.reset()
    model = moegemm.patch(build("llama4", "eager"))
    block = model.model.layers[0].feed_forward
    x = torch.randn(3, 7, 32)
    for got, expected in zip(torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
