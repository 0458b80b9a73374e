"""fp8 checkpoints with other scales than those of 128 x 128 blocks: read packed, or dequantised by transformers."""

from importlib import import_module

import pytest
import torch
from tiny_models import assert_same, build, token_ids

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed")
import_module("moegemm.transformers")
import moegemm  # noqa: E402
from moegemm.integrations import notices  # noqa: E402
from quantized_checkpoints import SIZES, experts_of, load, with_blocks, write_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers")
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
DEQUANTISES = pytest.mark.skipif(RELEASE < (5, 17), reason="this transformers cannot dequantise separate fp8 experts")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="where transformers has kernels it dequantises nothing")


def dequantised(path):
    return load(path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))


def assert_same_logits(model, other):
    with torch.no_grad():
        got, expected = ({"logits": m(token_ids()).logits.float()} for m in (model, other))
    assert_same(got, expected, 2e-2)


@DEQUANTISES
def test_one_scale_for_each_tensor_is_read_packed(tmp_path):
    path = with_blocks(write_checkpoint("qwen3_moe", tmp_path / "fp8"), tmp_path / "tensor", None)
    model = load(path)
    experts = experts_of(model)[0]
    assert experts.gate_up_proj.dtype == torch.float8_e4m3fn
    gates, ups = experts.gate_up_proj_scale_inv[:, :, 0].unbind(1)
    assert (gates != ups).all()
    assert moegemm.report(model).layers[0].on_moegemm
    assert_same_logits(model, dequantised(path))


@DEQUANTISES
def test_gates_and_ups_of_less_than_a_block_are_read_packed(tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 48, "intermediate_size": 128, "head_dim": 32}
    monkeypatch.setitem(SIZES, "qwen3_moe", sizes)
    path = write_checkpoint("qwen3_moe", tmp_path)
    model = load(path)
    assert moegemm.report(model).layers[0].on_moegemm
    assert_same_logits(model, dequantised(path))


@DEQUANTISES
@ON_CPU
@pytest.mark.parametrize(("block", "method"), [((64, 64), "fp8"), ((1, 32), "mxfp8")])
def test_blocks_that_moegemm_does_not_read_are_dequantised_where_transformers_does(tmp_path, block, method):
    notices._said.clear()
    path = with_blocks(write_checkpoint("qwen3_moe", tmp_path / "fp8"), tmp_path / method, block, method)
    with pytest.warns(UserWarning, match=rf"dequantises the checkpoint .* with blocks \({block[0]}, {block[1]}\); "):
        model = load(path)
    assert experts_of(model)[0].gate_up_proj.dtype == torch.bfloat16
    assert moegemm.report(model).layers[0].on_moegemm
    assert_same_logits(model, dequantised(path))


def test_grouped_linear_layers_in_fp8_are_not_read():
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    class TinyGroupedLinear(torch.nn.Linear):
        """As DeepSeek-V4's, by whose name transformers knows it."""

    model = build("qwen3_moe", "moegemm")
    model.model.layers[0].self_attn.o_proj = TinyGroupedLinear(8, 8)
    for skipped, expected in ((None, "model.layers.0.self_attn.o_proj, a TinyGroupedLinear"), (["o_proj"], None)):
        config = transformers.FineGrainedFP8Config(modules_to_not_convert=skipped)
        assert AUTO_QUANTIZER_MAPPING["fp8"](config, pre_quantized=True)._unread_part(model) == expected
