"""Experts that bitsandbytes quantised as parameters: read packed, trained through PEFT, and reported."""

import copy
from importlib import import_module

import moegemm
import pytest
import torch
from tiny_models import assert_same, build, randomise_adapters, token_ids

transformers = pytest.importorskip("transformers")
import_module("moegemm.transformers")
reason = "bitsandbytes is not installed"
functional = pytest.importorskip("bitsandbytes.functional", reason=reason, exc_type=ImportError)
parametrize = pytest.importorskip("bitsandbytes.nn.parametrize", reason=reason, exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
SIZES = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
}


def experts_of(model):
    return [m for name, m in model.named_modules() if name.endswith("mlp.experts")]


def quantised(family: str, **options):
    """A model whose experts bitsandbytes has quantised, and one with the weights that they stand for."""
    model = build(family, **SIZES[family]).bfloat16()
    model.config._experts_implementation = "moegemm"
    expected = copy.deepcopy(model)
    for experts, plain in zip(experts_of(model), experts_of(expected), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(experts, name, **options)
            getattr(plain, name).data = getattr(experts, name)
    return model, expected


def gradients(model, ids):
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach().float(), **found}


def kept_stacks(model):
    """The dtypes of what a forward keeps for the backward of whole stacks of experts."""
    kept = set()

    def note(tensor):
        if tensor.dim() == 3 and tensor.size(0) == model.config.num_experts:
            kept.add(tensor.dtype)
        return tensor

    hidden = model.model.embed_tokens(token_ids()).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(inputs_embeds=hidden)
    return kept


@pytest.mark.parametrize("nested", [False, True])
def test_its_experts_are_read_packed(nested):
    model, expected = quantised("qwen3_moe", compress_statistics=nested)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    assert kept_stacks(model.requires_grad_(False)) == {torch.uint8}
    assert [(layer.on_moegemm, layer.reason) for layer in moegemm.report(model).layers] == [(True, "")] * 2
    with pytest.raises(ValueError, match="is quantised already"):
        moegemm.quantize_experts(model, "nf4")


def test_adapters_beside_them_have_the_gradients_of_plain_weights():
    peft = pytest.importorskip("peft")
    # Of parametrized weights PEFT wants the whole names, and matches one of a module.
    targets = [f"model.layers.{layer}.mlp.experts.{'gate_up_proj' if layer else 'down_proj'}" for layer in range(2)]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=targets)
    found = [
        gradients(randomise_adapters(peft.get_peft_model(model, config), 3, 0.1), token_ids())
        for model in quantised("qwen3_moe", compress_statistics=True)
    ]
    assert sum("experts" in name for name in found[0]) == 4
    assert_same(*found, 2e-2)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gpt_oss", {}, "K before N"),
        ("qwen3_moe", {"quant_type": "fp4"}, "bitsandbytes' fp4"),
    ],
)
def test_what_is_not_read_packed_is_dequantised_and_the_report_says_so(family, options, words):
    model, expected = quantised(family, **options)
    ids = token_ids()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    for layer in moegemm.report(model).layers:
        assert layer.on_moegemm
        assert "dequantised for every call" in layer.reason
        assert words in layer.reason
    with pytest.raises(ValueError, match="is quantised already"):
        moegemm.quantize_experts(model, "mxfp4")


def test_other_parametrized_experts_are_not_quantised():
    model = build("qwen3_moe", **SIZES["qwen3_moe"]).bfloat16()
    torch.nn.utils.parametrize.register_parametrization(experts_of(model)[1], "down_proj", torch.nn.Identity())
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts has parametrized weights"):
        moegemm.quantize_experts(model, "mxfp4")
