"""PEFT's adapters beside packed weights: their dtype, and what is refused before anything has changed."""

import copy
from importlib import import_module

import moegemm
import pytest
import torch
from tiny_models import assert_same, build, randomise_adapters, token_ids

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate", reason="accelerate is not installed")
import_module("moegemm.transformers")
from quantized_checkpoints import experts_of, load, write_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
RELEASE = tuple(map(int, peft.__version__.split(".")[:2]))
LOADS_ADAPTERS = pytest.mark.skipif(
    RELEASE < (0, 20), reason="PEFT before 0.20 cannot load adapters into a model of today's transformers"
)
READS_COMPUTE_DTYPE = pytest.mark.skipif(
    RELEASE < (0, 19), reason="this PEFT casts adapters to the dtype of the weight that is beside them"
)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return write_checkpoint("qwen3_moe", tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    return write_checkpoint("gpt_oss", tmp_path_factory.mktemp("mxfp4"))


def adapters_in(model):
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}


@READS_COMPUTE_DTYPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_of_packed_linear_layers_get_the_dtype_of_the_model(fp8, dtype):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(load(fp8, dtype=dtype), config, autocast_adapter_dtype=False)
    assert {p.dtype for p in adapters_in(model).values()} == {dtype}
    assert model(token_ids()).logits.isfinite().all()


@LOADS_ADAPTERS
def test_adapters_loaded_with_little_memory_are_rounded_as_beside_bf16_weights(fp8, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = randomise_adapters(peft.get_peft_model(load(fp8), config), 3, 3e-4)  # little of which e4m3 can say
    model.save_pretrained(tmp_path)
    saved = adapters_in(model)
    again = peft.PeftModel.from_pretrained(load(fp8), tmp_path, low_cpu_mem_usage=True)
    for name, p in adapters_in(again).items():
        assert torch.equal(p.bfloat16(), saved[name].bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adapters_in_16_bits_run_in_the_dtype_of_the_activations(fp8, dtype):
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=TARGETS)
    model = peft.get_peft_model(load(fp8), config, autocast_adapter_dtype=False)
    assert {p.dtype for p in adapters_in(model).values()} == {torch.bfloat16}
    assert model.to(dtype)(token_ids()).logits.isfinite().all()


def test_packed_weights_tell_what_any_release_of_peft_asks_of_a_parameter(mxfp4):
    model = peft.get_peft_model(load(mxfp4), peft.LoraConfig(r=4, target_modules=[], target_parameters=TARGETS))
    param = next(m for m in model.modules() if hasattr(m, "parameter_name")).get_param()
    assert param.ndim == param.dim() == len(param.shape) == 3
    assert param.dtype == torch.bfloat16


@pytest.mark.parametrize("how", ["merge_and_unload", "merge_adapter"])
@pytest.mark.parametrize(("checkpoint", "targets"), [("mxfp4", TARGETS), ("fp8", TARGETS), ("fp8", None)])
def test_merging_into_packed_weights_is_refused_before_anything_is_merged(request, checkpoint, targets, how):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets)
    model = peft.get_peft_model(load(request.getfixturevalue(checkpoint)), config)
    model = randomise_adapters(model, 3, 0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(NotImplementedError, match=r"is in (mxfp4|fp8\S*), which cannot have an adapter merged into it"):
        getattr(model, how)()
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(p.view(torch.uint8), after[name].view(torch.uint8)) for name, p in before.items())


def test_merging_one_layer_into_packed_weights_is_refused(mxfp4):
    model = peft.get_peft_model(load(mxfp4), peft.LoraConfig(r=4, target_modules=[], target_parameters=TARGETS))
    wrapper = next(m for m in model.modules() if hasattr(m, "parameter_name"))
    with pytest.raises(NotImplementedError, match="is in mxfp4, which cannot have an adapter merged into it"):
        wrapper.merge()


def test_adapters_beside_plain_weights_are_merged_as_ever(mxfp4):
    model = peft.get_peft_model(load(mxfp4), peft.LoraConfig(r=4, target_modules=["q_proj"]))  # which are in bf16
    model = randomise_adapters(model, 3, 0.1)
    with torch.no_grad():
        expected = model(token_ids()).logits
        torch.testing.assert_close(model.merge_and_unload()(token_ids()).logits, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("intermediate", [64, 96])  # with 64, down_proj is square
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_experts_may_be_quantised_beneath_their_adapters(family, intermediate):
    def adapted(model):
        config = peft.LoraConfig(r=4, target_modules=[], target_parameters=TARGETS)
        return randomise_adapters(peft.get_peft_model(model, config), 3, 0.5)

    base = build(family, "moegemm", hidden_size=64, moe_intermediate_size=intermediate, intermediate_size=intermediate)
    rounded = copy.deepcopy(base)
    for experts in experts_of(rounded):
        for w in (experts.gate_up_proj, experts.down_proj):
            rows = w.data.transpose(1, 2) if experts.is_transposed else w.data
            rows.copy_(moegemm.quantize(rows.contiguous(), "fp8").dequantize(torch.float32))
    model = moegemm.quantize_experts(adapted(base), "fp8")
    with torch.no_grad():
        got, expected = ({"logits": m(token_ids()).logits} for m in (model, adapted(rounded)))
    assert_same(got, expected, 1e-4)


@pytest.mark.parametrize("format", ["mxfp4", "fp8", "int4", "nf4"])
def test_what_peft_widens_for_training_has_the_same_results(format):
    model = build("qwen3_moe", "moegemm", hidden_size=64, moe_intermediate_size=32).bfloat16()
    experts = experts_of(moegemm.quantize_experts(model, format))[0]
    x, routed = torch.randn(5, 64, dtype=torch.bfloat16), (torch.tensor([[0, 1]] * 5), torch.rand(5, 2))
    expected = experts(x, *routed)
    model = peft.prepare_model_for_kbit_training(model)
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(experts(x, *routed), expected)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=TARGETS))
    model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
