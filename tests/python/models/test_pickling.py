"""A patched model goes through torch.save and comes back patched, in this process and in another one."""

import copy
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import moegemm
import pytest
import torch
from own_experts import Biased, OwnExperts
from tiny_models import build, experts_of, routing, token_ids

import_module("moegemm.transformers")

# Neither names moegemm nor imports it before the files are loaded and run.
LOAD = """
import sys, torch
folder, *names = sys.argv[1:]
loaded = {name: torch.load(f"{folder}/{name}", weights_only=False) for name in names}
for name, model in loaded.items():
    expected, arguments, named = torch.load(f"{folder}/{name}.expected")
    got = model(*arguments, **named)
    torch.testing.assert_close(getattr(got, "logits", got), expected, rtol=0, atol=0)
import moegemm
for model in loaded.values():
    assert all(layer.on_moegemm for layer in moegemm.report(model).layers), moegemm.report(model)
"""


def save(folder: Path, name: str, model: torch.nn.Module, *arguments, **named) -> None:
    """The model, and what it makes of some arguments."""
    with torch.no_grad():
        got = model(*arguments, **named)
    torch.save((getattr(got, "logits", got), arguments, named), folder / f"{name}.expected")
    torch.save(model, folder / name)


def load_elsewhere(folder: Path, *names: str) -> None:
    """In a process that has nothing but the files."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    finished = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), *names], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr


@pytest.mark.smoke
def test_patched_models_and_modules_are_loaded_in_a_fresh_process(tmp_path):
    for kind in (OwnExperts, Biased):
        save(tmp_path, kind.__name__, moegemm.patch(kind()), torch.randn(40, 16), *routing(4))
    for family in ("qwen3_moe", "gpt_oss", "llama4"):
        save(tmp_path, family, moegemm.patch(build(family, "eager")).eval(), input_ids=token_ids())
    load_elsewhere(tmp_path, "OwnExperts", "Biased", "qwen3_moe", "gpt_oss", "llama4")


def test_loading_a_patched_model_registers_the_name(tmp_path):
    """Also without a module that moegemm made a class for."""
    save(tmp_path, "qwen3_moe", moegemm.patch(build("qwen3_moe", "eager")).eval(), input_ids=token_ids())
    load_elsewhere(tmp_path, "qwen3_moe")


def test_llama4_made_by_name_is_loaded(tmp_path):
    model = build("llama4", "moegemm").eval()
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    assert all(layer.on_moegemm for layer in moegemm.report(loaded).layers)
    assert torch.equal(loaded(input_ids=token_ids()).logits, model(input_ids=token_ids()).logits)


def test_what_was_loaded_can_be_unpatched(tmp_path):
    for model, kind in (
        (build("qwen3_moe", "eager"), None),
        (build("llama4", "eager"), None),
        (OwnExperts(), OwnExperts),
    ):
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
