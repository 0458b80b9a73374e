"""A patched model goes through torch.save and comes back patched, in this process and in another one."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import moegemm
import pytest
import torch
from own_experts import Biased, OwnExperts
from tiny_models import build, experts_of, routing, token_ids

pytest.importorskip("moegemm.transformers")

# Neither names moegemm nor imports it: the file does.
LOAD_A_MODEL = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
expected, ids = torch.load(sys.argv[2])
got = model(input_ids=ids).logits
torch.testing.assert_close(got, expected, rtol=0, atol=0)
import moegemm
assert all(layer.on_moegemm for layer in moegemm.report(model).layers), moegemm.report(model)
"""
LOAD_A_MODULE = """
import sys, torch
module = torch.load(sys.argv[1], weights_only=False)
expected, arguments = torch.load(sys.argv[2])
torch.testing.assert_close(module(*arguments), expected, rtol=0, atol=0)
import moegemm
assert moegemm.report(module).layers[0].on_moegemm, moegemm.report(module)
"""


def run_elsewhere(program: str, *arguments: Path) -> None:
    """In a process that has nothing but the files."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *sys.path])
    finished = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_a_patched_model_is_loaded_in_a_fresh_process(family, tmp_path):
    model = moegemm.patch(build(family, "eager")).eval()
    with torch.no_grad():
        torch.save((model(input_ids=token_ids()).logits, token_ids()), tmp_path / "expected")
    torch.save(model, tmp_path / "model")
    run_elsewhere(LOAD_A_MODEL, tmp_path / "model", tmp_path / "expected")


@pytest.mark.parametrize("kind", [OwnExperts, Biased])
def test_a_patched_module_is_loaded_in_a_fresh_process(kind, tmp_path):
    module = moegemm.patch(kind())
    arguments = (torch.randn(40, 16), *routing(4))
    torch.save((module(*arguments).detach(), arguments), tmp_path / "expected")
    torch.save(module, tmp_path / "module")
    run_elsewhere(LOAD_A_MODULE, tmp_path / "module", tmp_path / "expected")


def test_llama4_made_by_name_is_loaded(tmp_path):
    model = build("llama4", "moegemm").eval()
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    assert all(layer.on_moegemm for layer in moegemm.report(loaded).layers)
    assert torch.equal(loaded(input_ids=token_ids()).logits, model(input_ids=token_ids()).logits)


def test_what_was_loaded_can_be_unpatched(tmp_path):
    for model, kind in ((build("qwen3_moe", "eager"), None), (build("llama4", "eager"), None), (OwnExperts(), OwnExperts)):
        torch.save(moegemm.patch(model), tmp_path / "model")
        loaded = moegemm.unpatch(torch.load(tmp_path / "model", weights_only=False))
        assert not any(layer.on_moegemm for layer in moegemm.report(loaded).layers)
        assert kind is None or type(loaded) is kind


def test_copies_are_patched_and_independent():
    for model in (OwnExperts(), build("llama4", "eager")):
        copied = copy.deepcopy(moegemm.patch(model))
        moegemm.unpatch(model)
        assert all(layer.on_moegemm for layer in moegemm.report(copied).layers)
        assert experts_of(copied).gate_up_proj is not experts_of(model).gate_up_proj


def test_state_dicts_are_those_of_the_unpatched_model():
    model = build("llama4", "eager")
    names = list(model.state_dict())
    assert list(moegemm.patch(model).state_dict()) == names
