"""Checkpoints in MXFP4 and fp8 whose experts stay packed: the dequantised model's numbers, trained through PEFT."""

import copy
import io
import json
from importlib import import_module

import moegemm
import pytest
import torch
from conftest import DEVICES
from safetensors import safe_open
from tiny_models import assert_same, randomise_adapters, token_ids

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate", reason="accelerate is not installed")
import_module("moegemm.transformers")
from quantized_checkpoints import experts_of, load, write_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
FAMILIES = ["gpt_oss", "qwen3_moe"]
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
TOLERANCE = 2e-2  # of a norm: bf16 activations through two layers, weights in another layout


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {family: write_checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def require_dequantising(family):
    """Early releases of transformers 5 cannot merge the dequantised experts of an fp8 checkpoint."""
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if family == "qwen3_moe" and release < (5, 17):
        pytest.skip(f"transformers {transformers.__version__} cannot dequantise separate fp8 experts")


def dequantised(path, family, device="cpu"):
    require_dequantising(family)
    kind = transformers.Mxfp4Config if family == "gpt_oss" else transformers.FineGrainedFP8Config
    return load(path, device, quantization_config=kind(dequantize=True))


def adapted(model, seed=3):
    """With adapters on experts and attention that are not zero, the same for each call."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=TARGETS)
    return randomise_adapters(peft.get_peft_model(model, config), seed, 0.1)


def gradients(model, ids):
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().float(), **found}


@pytest.mark.smoke
@pytest.mark.parametrize("device", DEVICES)
def test_one_line_loads_it_packed_with_the_logits_of_the_dequantised_model(checkpoints, family, device):
    model = load(checkpoints[family], device)
    for experts in experts_of(model):
        assert experts.gate_up_proj.element_size() == 1
        assert experts.gate_up_proj.device.type == device
    report = moegemm.report(model)
    assert [layer.on_moegemm for layer in report.layers] == [True, True], report
    ids = token_ids().to(device)
    with torch.no_grad():
        got, expected = (m(ids).logits.float() for m in (model, dequantised(checkpoints[family], family, device)))
    assert_same({"logits": got}, {"logits": expected}, TOLERANCE)
    tokens = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, ids.size(1) + 3)


def test_its_experts_are_the_bytes_of_the_checkpoint(checkpoints, family):
    model = load(checkpoints[family])
    experts = experts_of(model)[1]
    with safe_open(checkpoints[family] / "model.safetensors", "pt") as file:
        prefix = "model.layers.1.mlp.experts."
        if family == "gpt_oss":
            assert torch.equal(experts.down_proj.flatten(2), file.get_tensor(f"{prefix}down_proj_blocks").flatten(2))
            assert torch.equal(experts.down_proj_scales, file.get_tensor(f"{prefix}down_proj_scales"))
        else:
            values, scales = (file.get_tensor(f"{prefix}2.down_proj.{n}") for n in ("weight", "weight_scale_inv"))
            assert torch.equal(experts.down_proj[2].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(experts.down_proj_scale_inv[2], scales)


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_have_the_gradients_of_the_dequantised_model(checkpoints, family, device):
    ids = token_ids().to(device)
    got, expected = (
        gradients(adapted(model), ids)
        for model in (load(checkpoints[family], device), dequantised(checkpoints[family], family, device))
    )
    assert sum("experts" in name for name in got) == 8
    assert sum("q_proj" in name for name in got) == 4
    assert_same(got, expected, 3 * TOLERANCE)


def test_trainer_trains_it_and_the_adapter_comes_back(checkpoints, family, tmp_path):
    model = load(checkpoints[family])
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = adapted(model)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    ids = token_ids(4, 16)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=20, per_device_train_batch_size=4, learning_rate=2e-2,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    dataset = [{"input_ids": row, "labels": row} for row in ids] * 20
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.99 * sum(losses[:5])  # the head is frozen and random
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter.view(torch.uint8), frozen[name].view(torch.uint8)), name
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(checkpoints[family]), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


def test_an_adapter_fits_the_dequantised_model(checkpoints, family, tmp_path):
    model = adapted(load(checkpoints[family])).eval()
    model.save_pretrained(tmp_path)
    other = peft.PeftModel.from_pretrained(dequantised(checkpoints[family], family), tmp_path).eval()
    ids = token_ids()
    with torch.no_grad():
        got, expected = ({"logits": m(ids).logits.float()} for m in (model, other))
    assert_same(got, expected, TOLERANCE)


@pytest.mark.smoke
def test_it_is_saved_as_it_was_loaded(checkpoints, family, tmp_path):
    model = load(checkpoints[family])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] in ("mxfp4", "fp8")
    with (
        safe_open(checkpoints[family] / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "model.safetensors", "pt") as after,
    ):
        assert set(before.keys()) == set(after.keys())
        for name in before.keys():  # noqa: SIM118
            a, b = before.get_tensor(name), after.get_tensor(name)
            # transformers 5.17 makes a scalar of the scale of a single block
            assert a.shape == b.shape or (a.numel() == 1 and name.endswith("scale_inv")), name
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def test_layers_offloaded_to_disk_have_the_same_logits(checkpoints, family, tmp_path):
    parts = dict.fromkeys(("embed_tokens", "layers.0", "norm", "rotary_emb"), "cpu") | {"layers.1": "disk"}
    places = {f"model.{part}": place for part, place in parts.items()} | {"lm_head": "cpu"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints[family], experts_implementation="moegemm", attn_implementation="eager", dtype=torch.bfloat16,
        device_map=places, offload_folder=str(tmp_path),
    )  # fmt: skip
    assert experts_of(model)[1].down_proj.device.type == "meta"
    ids = token_ids()
    with torch.no_grad():
        got, expected = ({"logits": m(ids).logits.float()} for m in (model, load(checkpoints[family])))
    assert_same(got, expected, TOLERANCE)  # transformers 5.7 rounds scales that it offloads


def test_it_pickles_patched(checkpoints, family):
    model = load(checkpoints[family])
    file = io.BytesIO()
    torch.save(model, file)  # plain pickle cannot read torch's fp8 tensors back
    file.seek(0)
    again = torch.load(file, weights_only=False)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_fp8_scales_may_have_16_bits(tmp_path, scales):
    path = write_checkpoint("qwen3_moe", tmp_path, scales)
    ids = token_ids()
    with torch.no_grad():
        got, expected = ({"logits": m(ids).logits.float()} for m in (load(path), dequantised(path, "qwen3_moe")))
    assert_same(got, expected, TOLERANCE)


def test_other_implementations_load_as_without_moegemm(checkpoints, family):
    require_dequantising(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints[family], experts_implementation="eager", dtype=torch.bfloat16
    )
    if not torch.cuda.is_available():  # transformers dequantises where it has no kernels
        assert experts_of(model)[0].gate_up_proj.dtype == torch.bfloat16


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "int4", "nf4"])
def test_experts_of_a_model_in_memory_are_quantised_in_place(checkpoints, family, format):
    model = dequantised(checkpoints[family], family)
    ids = token_ids()
    before = sum(p.nbytes for p in model.parameters())
    rounded = copy.deepcopy(model)
    for experts in experts_of(rounded):
        for w in (experts.gate_up_proj, experts.down_proj):
            rows = w.data.transpose(1, 2).contiguous() if experts.is_transposed else w.data
            made = moegemm.quantize(rows, format).dequantize()
            w.data = made.transpose(1, 2).contiguous() if experts.is_transposed else made
    assert moegemm.quantize_experts(model, format) is model
    assert sum(p.nbytes for p in model.parameters()) < 0.7 * before
    with torch.no_grad():
        got, expected = ({"logits": m(ids).logits.float()} for m in (model, rounded))
    assert_same(got, expected, TOLERANCE)
    found = gradients(adapted(model), ids)
    assert sum("experts" in name for name in found) == 8
    with pytest.raises(ValueError, match="is quantised already"):
        moegemm.quantize_experts(model, format)


@pytest.mark.parametrize("format", ["mxfp4", "fp8"])
def test_experts_quantised_in_memory_are_not_saved_as_plain_weights(checkpoints, family, format, tmp_path):
    model = moegemm.quantize_experts(dequantised(checkpoints[family], family), format)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again, ids = torch.load(file, weights_only=False), token_ids()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    for refused in (model, copy.deepcopy(model), again, model.model):
        with pytest.raises(ValueError, match=r"layers.0.mlp.experts .*quantize_experts has quantised.* torch.save"):
            refused.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    adapted(model).save_pretrained(tmp_path)  # adapters beside them are saved
    assert (tmp_path / "adapter_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_change_of_dtype_leaves_packed_weights_alone(checkpoints, family, dtype):
    model, ids = load(checkpoints[family]), token_ids()
    packed = {name: (p.dtype, p.clone()) for name, p in model.named_parameters() if p.element_size() == 1}
    plain = dequantised(checkpoints[family], family)
    with torch.no_grad():
        got, expected = ({"logits": m.to(dtype)(ids).logits.float()} for m in (model, plain))
    assert_same(got, expected, TOLERANCE)
    for name, p in model.named_parameters():
        if name in packed:
            assert p.dtype == packed[name][0]
            assert torch.equal(p.view(torch.uint8), packed[name][1].view(torch.uint8)), name
        elif name.endswith("scale_inv"):
            assert p.dtype == torch.float32
        else:
            assert p.dtype == dtype, name


@pytest.mark.parametrize("format", ["fp8", "int4", "nf4"])
def test_a_change_of_dtype_leaves_experts_quantised_in_memory_alone(checkpoints, format):
    model = moegemm.quantize_experts(dequantised(checkpoints["gpt_oss"], "gpt_oss"), format)
    before = {name: p.clone() for name, p in model.named_parameters() if "experts" in name and "bias" not in name}
    for name, p in model.half().named_parameters():
        if name in before:
            assert p.dtype == before[name].dtype
            assert torch.equal(p.view(torch.uint8), before[name].view(torch.uint8)), name


def layers_of_fp8(path):
    model = load(path)
    return {"gate_up_proj": (model, experts_of(model)[0]), "weight": (model, model.model.layers[0].self_attn.q_proj)}


@pytest.mark.parametrize("name", ["gate_up_proj", "weight"])
def test_values_that_were_cast_without_their_scales_are_refused(checkpoints, name):
    model, module = layers_of_fp8(checkpoints["qwen3_moe"])[name]
    getattr(module, name).data = getattr(module, name).data.to(torch.bfloat16)
    with pytest.raises(TypeError, match=rf"{name} of \w+ has dtype torch.bfloat16 beside scales; values of 8 bits"):
        model(token_ids())
    if name == "gate_up_proj":
        layer = moegemm.report(model).layers[0]
        assert not layer.on_moegemm
        assert "beside scales" in layer.reason


@pytest.mark.parametrize("name", ["gate_up_proj", "weight"])
def test_a_state_dict_with_other_dtypes_of_packed_weights_is_refused(checkpoints, name):
    _, module = layers_of_fp8(checkpoints["qwen3_moe"])[name]
    own, scales = module.state_dict(), f"{name}_scale_inv"
    plain = {**own, name: own[name].bfloat16()}
    plain.pop(scales)
    for given in (plain, {**own, scales: own[scales].double()}):
        with pytest.raises(RuntimeError, match=rf"{name}\w* has dtype torch.\w+; torch.float\w+ is accepted, as the"):
            module.load_state_dict(given, strict=False)
    narrow = own[scales].bfloat16()
    module.load_state_dict({**own, scales: narrow})
    assert torch.equal(getattr(module, scales), narrow.float())


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("name", ["gate_up_proj", "weight"])
def test_a_gradient_of_packed_weights_is_refused(checkpoints, name, scales):
    model, module = layers_of_fp8(checkpoints["qwen3_moe"])[name]
    getattr(module, f"{name}_scale_inv" if scales else name).requires_grad_()
    with pytest.raises(TypeError, match=f"{name} of .* require a gradient; a quantised weight is frozen"):
        model(token_ids())
    assert moegemm.report(model).layers[0].on_moegemm
    with torch.no_grad():
        model(token_ids())


def test_fp32_activations_are_multiplied_in_fp32(checkpoints):
    ids = token_ids()
    models = (load(checkpoints["gpt_oss"]), dequantised(checkpoints["gpt_oss"], "gpt_oss"))  # exact in bf16
    with torch.no_grad():
        got, expected = ({"logits": m.to(torch.float32)(ids).logits} for m in models)
    assert_same(got, expected, 1e-5)
    _, linear = layers_of_fp8(checkpoints["qwen3_moe"])["weight"]
    x, values = torch.randn(3, linear.in_features), linear.weight.unsqueeze(0)
    plain = moegemm.QuantizedWeight.from_fp8(values, linear.weight_scale_inv.unsqueeze(0)).dequantize(torch.float32)[0]
    assert_same({"y": linear(x)}, {"y": torch.nn.functional.linear(x, plain)}, 1e-5)


@pytest.mark.smoke
@pytest.mark.filterwarnings("error:.*activation in torch")
def test_compiled_experts_keep_their_fused_activation(checkpoints, family):
    from moegemm.integrations import notices

    torch._dynamo.reset()
    notices._said.clear()
    experts = experts_of(load(checkpoints[family]))[0]
    x = torch.randn(5, experts.down_proj.size(1), dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 2]]), torch.rand(5, 2)
    with torch.no_grad():
        got = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, ids, weights)
        assert torch.equal(got, experts(x, ids, weights))


def test_a_linear_layer_takes_no_tokens(checkpoints):
    _, linear = layers_of_fp8(checkpoints["qwen3_moe"])["weight"]
    for shape in ((0,), (2, 0)):
        x = torch.empty((*shape, linear.in_features), dtype=torch.bfloat16)
        assert linear(x).shape == (*shape, linear.out_features)


def test_a_linear_layer_takes_one_vector(checkpoints):
    _, linear = layers_of_fp8(checkpoints["qwen3_moe"])["weight"]
    x = torch.randn(3, linear.in_features, dtype=torch.bfloat16)
    assert torch.equal(linear(x[1]), linear(x)[1])
