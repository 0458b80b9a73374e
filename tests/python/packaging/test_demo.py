"""The demo that `make demo` runs, at toy size."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
OPERATIONS = ("route", "first product", "second product", "its dX", "its dW", "combine", "whole layer, forward")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_demo_shows_operations_curves_and_what_to_try_next(tmp_path):
    options = ["--device", "cpu", "--tokens", "16", "--steps", "3", "--out", tmp_path]
    command = [sys.executable, EXAMPLES / "demo.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    for operation in OPERATIONS:
        assert f"\n{operation}" in done.stdout
    assert f"loss curves: {tmp_path / 'training.png'}" in done.stdout
    assert (tmp_path / "training.png").stat().st_size > 10_000
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Try next: ")
    suggested = next(part for part in last.split("`") if part.startswith("moegemm "))
    subprocess.run([sys.executable, "-m", *suggested.split()], check=True, capture_output=True, timeout=60)
    assert "WRONG" not in done.stdout


def test_one_slow_turn_decides_no_ratio():
    demo = load("demo")
    steady = [1.0] * 9
    line = demo.Line.of("x", {"moegemm": [*steady[:-1], 1000.0], "loop": [1000.0, *[2.0] * 8], "grouped": [3.0] * 9})
    assert (line.ours, line.theirs, line.theirs_by) == (1.0, 2.0, "loop")
    assert line.unsteady == pytest.approx(1.0)


def test_one_slow_step_decides_no_speed():
    training = load("train_moe").Training.__new__(load("train_moe").Training)
    training.tokens, training.seconds = 100, [50.0, 1.0, 1.0, 30.0, 1.0, 1.0]
    assert training.tokens_per_second == 100
