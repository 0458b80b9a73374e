"""PEFT's adapters on expert parameters: the same numbers as PEFT's own path, and no weight is ever built."""

import concurrent.futures
import os
import subprocess
import sys
import types
from importlib import import_module

import pytest
import torch
from tiny_models import FAMILIES, assert_same, build, outputs_and_gradients, randomise_adapters, routing, token_ids

peft = pytest.importorskip("peft")
if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
    pytest.skip(f"peft {peft.__version__} cannot target parameters", allow_module_level=True)
lora_layers = pytest.importorskip("peft.tuners.lora.layer")
adapters = import_module("moegemm.integrations.peft_adapters")
notices = import_module("moegemm.integrations.notices")
import_module("moegemm.transformers")

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
TOLERANCE = 2e-5  # of a norm, in fp32
RELEASE = tuple(map(int, peft.__version__.split(".")[:2]))
ONE_ADAPTER = pytest.mark.skipif(RELEASE < (0, 20), reason="this PEFT takes one adapter of parameters only")


class Built:
    """How often PEFT made a product of whole weights."""

    def __init__(self) -> None:
        self.times = 0


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    counted = Built()
    names = [name for name in ("_LoraParameterProxy", "_LoraFactorsProxy") if hasattr(lora_layers, name)]
    for name in names:
        proxy = getattr(lora_layers, name)

        def count(self, w, own=proxy.forward):
            counted.times += 1
            return own(self, w)

        monkeypatch.setattr(proxy, "forward", count)
    return counted


def config(**changes) -> "peft.LoraConfig":
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_parameters": TARGETS, **changes})


def adapted(family: str = "qwen3_moe", implementation: str = "moegemm", dtype=torch.float32, **changes):
    base = build(family, implementation).to(dtype)
    return randomise_adapters(peft.get_peft_model(base, config(**changes)), 7, 0.2)


def both_ways(monkeypatch, model, ids=None, step=outputs_and_gradients) -> tuple[dict, dict]:
    """What moegemm gives, and what PEFT's own path gives on the same model."""
    ids = token_ids() if ids is None else ids
    got = step(model, ids)
    with monkeypatch.context() as patched:
        patched.setattr(adapters, "_reads_notes", lambda module: False)
        return got, step(model, ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_all_gradients_are_those_of_peft(monkeypatch, built, family):
    model = adapted(family)
    got = outputs_and_gradients(model, token_ids())
    assert built.times == 0
    got, expected = both_ways(monkeypatch, model)
    assert built.times > 0
    found = sum("lora_" in name and ".experts." in name for name in got)
    assert found == (4 if family == "deepseek_v3" else 8)  # whose first layer is dense
    assert_same(got, expected, TOLERANCE)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swapped", [None, False, True])
def test_factors_are_those_of_every_release_of_peft(swapped, transposed):
    """Before 0.19 a wrapper does not say which dimension it took for the input: the second one then."""
    experts, into, out, rank = 3, 5, 7, 2
    linear = {
        "a": torch.nn.Linear(into, rank * experts, bias=False),
        "b": torch.nn.Linear(rank * experts, out, bias=False),
    }
    known = {} if swapped is None else {"_did_swap_in_out_features": swapped}
    wrapper = types.SimpleNamespace(
        num_experts=experts, lora_A={"it": linear["a"]}, lora_B={"it": linear["b"]}, scaling={"it": 0.5}, **known,
        get_base_layer=torch.nn.Module,
    )  # fmt: skip
    low = adapters._low_rank(wrapper, "it", transposed, torch.float32)
    a, b = linear["a"].weight.view(experts, rank, into), linear["b"].weight.view(out, rank, experts)
    stored = torch.einsum("ore,eri->eoi" if swapped else "ore,eri->eio", b, a)  # the parameter's shape
    torch.testing.assert_close(low.B @ low.A, stored.mT if transposed else stored)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank_pattern": {"layers.0.mlp.experts.down_proj": 3, "layers.1.mlp.experts.gate_up_proj": 11}},
        {"alpha_pattern": {"layers.0.mlp.experts.gate_up_proj": 3}},
        {"use_rslora": True, "r": 5},
        {"target_parameters": TARGETS[:1]},
        {"target_parameters": TARGETS[1:]},
        {"target_modules": ["q_proj"], "lora_dropout": 0.0},
        {"r": 1},
    ],
    ids=["rank_pattern", "alpha_pattern", "rslora", "gate_up", "down", "attention", "rank_1"],
)
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # they do match
def test_a_config_means_what_it_means_to_peft(monkeypatch, changes):
    model = adapted(**changes)
    wrappers = [m for m in model.modules() if isinstance(m, lora_layers.ParamWrapper)]
    if "rank_pattern" in changes:
        assert {w.r["default"] for w in wrappers} == {3, 4, 11}
    if "alpha_pattern" in changes:
        assert {w.scaling["default"] for w in wrappers} == {0.75, 2.0}
    assert_same(*both_ways(monkeypatch, model), TOLERANCE)


def test_experts_that_train_get_their_gradients_too(monkeypatch):
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" in name or "gate" in name)
    got, expected = both_ways(monkeypatch, model)
    assert any(name.endswith("gate_up_proj") for name in got)
    assert_same(got, expected, TOLERANCE)


@ONE_ADAPTER
def test_adapters_are_added_switched_and_disabled(monkeypatch, built):
    model = adapted()
    model.add_adapter("other", config(r=3, lora_alpha=5, use_rslora=True))
    randomise_adapters(model, 11, 0.2)
    seen = []
    for active in (["default"], ["other"], ["default", "other"]):
        model.base_model.set_adapter(active)
        built.times = 0
        logits = model(token_ids()).logits.detach()
        assert built.times == 0
        got, expected = both_ways(monkeypatch, model)
        assert_same(got, expected, TOLERANCE)
        torch.testing.assert_close(logits, got["logits"])
        seen.append(logits)
    with model.disable_adapter():
        seen.append(model(token_ids()).logits.detach())
    torch.testing.assert_close(seen[-1], build("qwen3_moe", "moegemm")(token_ids()).logits)
    assert all((a - b).norm() > 0.01 * a.norm() for i, a in enumerate(seen) for b in seen[:i])


def test_merging_and_unmerging_change_only_roundings():
    model = adapted()
    before = model(token_ids()).logits
    model.merge_adapter()
    torch.testing.assert_close(model(token_ids()).logits, before, rtol=1e-3, atol=1e-4)
    model.unmerge_adapter()
    torch.testing.assert_close(model(token_ids()).logits, before, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.merge_and_unload()(token_ids()).logits, before, rtol=1e-3, atol=1e-4)


def test_adapter_files_are_interchangeable(tmp_path, built):
    models = {way: adapted(implementation=way) for way in ("eager", "moegemm")}
    for way, model in models.items():
        model.save_pretrained(tmp_path / way)
    files = [(tmp_path / way / "adapter_model.safetensors").read_bytes() for way in models]
    assert files[0] == files[1]
    loaded = peft.PeftModel.from_pretrained(build("qwen3_moe", "moegemm"), tmp_path / "eager")
    built.times = 0
    torch.testing.assert_close(loaded(token_ids()).logits, models["moegemm"](token_ids()).logits)
    assert built.times == 0
    elsewhere = peft.PeftModel.from_pretrained(build("qwen3_moe", "eager"), tmp_path / "moegemm")
    torch.testing.assert_close(elsewhere(token_ids()).logits, models["eager"](token_ids()).logits)


@pytest.mark.parametrize("reentrant", [False, True], ids=["functional", "reentrant"])
def test_checkpointing_recomputes_the_same(reentrant):
    model = adapted().train()
    expected = outputs_and_gradients(model, token_ids())
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(outputs_and_gradients(model, token_ids()), expected, 0.0)


def expert_layer(model: torch.nn.Module) -> torch.nn.Module:
    """The experts of the first layer with what PEFT put around them."""
    return model.base_model.model.model.layers[0].mlp.experts


def layer_step(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of an expert layer and its gradients. A whole model in 16 bits would route by its roundings."""
    layer = expert_layer(model)
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(2)
        ids, weights = routing(6)
    out = layer(x, ids, weights.to(x.dtype))
    out.square().sum().backward()
    return {"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}


def layer_input(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(3)).to(dtype)


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """The same numbers in fp32 that a bf16 model has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def test_fp32_adapters_beside_bf16_experts(monkeypatch):
    """PEFT keeps the adapters of a bf16 model in fp32. No further from the exact layer than PEFT's rounded sum is."""
    model = rounded(adapted(dtype=torch.bfloat16))
    assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if "lora_" in name)
    got, expected = both_ways(monkeypatch, model, layer_input(torch.bfloat16), layer_step)
    exact = layer_step(rounded(adapted()), layer_input(torch.bfloat16).float())
    for name in got:
        assert got[name].dtype == expected[name].dtype
        errors = [((found[name] - exact[name]).norm() / exact[name].norm()).item() for found in (got, expected)]
        slack = 1.2 if RELEASE >= (0, 21) else 1.6  # before, it multiplies A and B in fp32
        assert errors[0] <= min(slack * errors[1], 0.02), (name, errors)


def test_autocast_runs_in_its_dtype(monkeypatch):
    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer_step(model, x)

    got, expected = both_ways(monkeypatch, adapted(), layer_input(torch.float32), step)
    assert_same(got, expected, 0.02)
    assert all(got[name].dtype == expected[name].dtype for name in got)
    assert not torch.equal(got["out"], layer_step(adapted(), layer_input(torch.float32))["out"])


@pytest.mark.smoke
def test_compiles_as_one_graph(built):
    torch._dynamo.reset()
    model = adapted()
    mlp = model.base_model.model.model.layers[0].mlp
    x = torch.randn(1, 12, 32)
    expected = mlp(x)
    got = torch.compile(mlp, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    assert mlp.experts.lora_A["default"].weight.grad is not None
    assert built.times == 0


def test_threads_that_share_a_model_get_its_results():
    model, ids = adapted().eval(), token_ids()
    with torch.no_grad():
        expected = model(ids).logits

    def run(_):
        with torch.no_grad():
            return torch.equal(model(ids).logits, expected)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(40)))
    assert run(None)


class OwnWrapper(lora_layers.ParamWrapper):
    def get_delta_weight(self, adapter_name, *args, **kwargs):
        return -super().get_delta_weight(adapter_name, *args, **kwargs)

    def get_delta_factors(self, adapter_name):
        lhs, rhs, scaling = super().get_delta_factors(adapter_name)
        return lhs, rhs, -scaling


def _with_variant(wrapper):
    wrapper.lora_variant["default"] = object()


def _with_own_class(wrapper):
    wrapper.__class__ = OwnWrapper


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_with_variant, "adapter 'default' is the variant object"), (_with_own_class, "OwnWrapper has a .* of its own")],
    ids=["variant", "class"],
)
def test_what_the_products_cannot_do_runs_the_way_of_peft(monkeypatch, built, change, reason):
    notices._said.clear()
    model = adapted()
    for wrapper in model.modules():
        if isinstance(wrapper, lora_layers.ParamWrapper):
            change(wrapper)
    with pytest.warns(UserWarning, match=f"to the weights of Qwen3MoeExperts itself: {reason}") as said:
        got = outputs_and_gradients(model, token_ids())
    assert len([w for w in said if "moegemm" in str(w.message)]) == 1
    assert built.times > 0
    assert_same(*both_ways(monkeypatch, model), 0.0)
    assert_same(got, outputs_and_gradients(model, token_ids()), 0.0)


def test_dora_is_refused_by_peft_itself():
    with pytest.raises(ValueError, match="use_dora"):
        adapted(use_dora=True)


def test_weights_that_no_kernel_takes_run_eagerly_with_their_adapters(monkeypatch):
    notices._said.clear()
    model = adapted(dtype=torch.float64)
    with pytest.warns(UserWarning, match="runs its own eager code"):
        got = outputs_and_gradients(model, token_ids())
    expected = outputs_and_gradients(adapted(implementation="eager", dtype=torch.float64), token_ids())
    assert_same(got, expected, 1e-10)


@pytest.mark.parametrize("first", ["peft", "moegemm.transformers"])
def test_the_order_of_imports_does_not_matter(first):
    second = {"peft": "moegemm.transformers"}.get(first, "peft")
    code = f"import {first}, {second}; from peft.tuners.lora import ParamWrapper as P; P._activate_lora.peft_own"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300, env=environment)


def test_a_patched_model_with_adapters_already(built):
    import moegemm

    model = adapted(implementation="eager")
    expected = outputs_and_gradients(model, token_ids())
    moegemm.patch(model)
    built.times = 0
    assert_same(outputs_and_gradients(model, token_ids()), expected, TOLERANCE)
    assert built.times == 0
    moegemm.unpatch(model)
    assert_same(outputs_and_gradients(model, token_ids()), expected, TOLERANCE)
    assert built.times > 0


def samples(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in token_ids(count)]


def trained_by_trainer(model, folder, **arguments) -> dict[str, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = transformers.TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_strategy="no", **arguments,
    )  # fmt: skip
    transformers.Trainer(model, settings, train_dataset=samples()).train()
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("arguments", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointed"])
def test_the_trainer_of_transformers_runs_unchanged(monkeypatch, built, tmp_path, arguments):
    got = trained_by_trainer(adapted(), tmp_path, **arguments)
    assert built.times == 0
    monkeypatch.setattr(adapters, "_reads_notes", lambda module: False)
    expected = trained_by_trainer(adapted(), tmp_path, **arguments)
    assert built.times > 0
    assert_same(got, expected, 1e-3)
    assert any((got[name] - start).norm() > 1e-3 for name, start in adapted().named_parameters() if name in got)


def trained_by_trl(model, folder) -> dict[str, torch.Tensor]:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = trl.SFTConfig(
        str(folder), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, bf16=False,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", max_length=16,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"input_ids": ids.tolist()} for ids in token_ids(8)])
    trainer = trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=a_tokenizer())
    trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}


def a_tokenizer():
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(64)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2", bos_token="w1")


def test_the_sft_trainer_of_trl_runs_unchanged(monkeypatch, built, tmp_path):
    got = trained_by_trl(adapted(), tmp_path)
    assert built.times == 0
    monkeypatch.setattr(adapters, "_reads_notes", lambda module: False)
    expected = trained_by_trl(adapted(), tmp_path)
    assert built.times > 0
    assert_same(got, expected, 1e-3)
