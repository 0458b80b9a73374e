"""The demo that `make demo` runs, at toy size."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import load_program

EXAMPLES = Path(__file__).parents[3] / "examples"
OPERATIONS = ("route", "first product", "second product", "its dX", "its dW", "combine", "whole layer, forward")


def load(name: str):
    return load_program(f"examples/{name}.py")


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


class Machine:
    """A clock whose calls say how many seconds they take, and a second of wall time in which all are slow."""

    def __init__(self, slow_from: float = 1e9) -> None:
        self.now, self.slow_from, self.turns = 0.0, slow_from, 0

    def round_robin(self, calls, rounds, flops=0.0, warm_up=True):
        times = {who: [] for who in calls}
        for turn in range(warm_up + rounds):
            for who, call in calls.items():
                seconds = call() * (20 if self.slow_from <= self.now < self.slow_from + 1 else 1)
                self.now += seconds
                if turn >= warm_up:
                    times[who].append(1e3 * seconds)
        self.turns += rounds
        return times


def operations(demo, *seconds: float) -> list:
    return [
        demo.Operation(str(i), {"moegemm": lambda s=s: s, "loop": lambda s=s: 2 * s}, "ok")
        for i, s in enumerate(seconds)
    ]


@pytest.mark.parametrize("slow_from", [0.0, 0.35, 1.0, 3.7, 8.0])
def test_one_slow_second_decides_no_time(slow_from, monkeypatch):
    demo, machine = load("demo"), Machine(slow_from)
    monkeypatch.setattr(demo.time, "monotonic", lambda: machine.now)
    seconds = (0.001, 0.05, 0.05, 0.001, 0.05, 0.05, 0.002, 0.05)
    lines = demo.take_turns(operations(demo, *seconds), machine)
    assert [line.ours for line in lines] == pytest.approx([1e3 * s for s in seconds])
    assert {line.faster for line in lines} <= {"2.00x", "busy"}
    assert [line.faster for line in lines].count("2.00x") >= 4


def test_time_of_all_operations_has_a_bound(monkeypatch):
    demo, machine = load("demo"), Machine()
    monkeypatch.setattr(demo.time, "monotonic", lambda: machine.now)
    demo.take_turns(operations(demo, 1.0, 0.001), machine)
    assert machine.turns == 3 + demo.MOST_TURNS
    machine.now = 0.0
    lines = demo.take_turns(operations(demo, *[1.0] * 10), machine)
    assert machine.now <= demo.MOST_SECONDS + 3.0
    assert {line.faster for line in lines} == {"busy"}  # a turn or two each


def test_times_that_lie_far_apart_make_no_ratio():
    demo = load("demo")
    steady = [1.0] * 9
    line = demo.Line.of("x", {"moegemm": [*steady[:-1], 1000.0], "loop": [1000.0, *[2.0] * 8], "grouped": [3.0] * 9})
    assert (line.ours, line.theirs, line.theirs_by, line.faster) == (1.0, 2.0, "loop", "2.00x")
    assert line.unsteady == pytest.approx(1.0)
    assert demo.Line.of("x", {"moegemm": steady, "loop": [1.0, 9.0] * 4}).faster == "busy"
    microseconds = {"moegemm": [0.04, 0.08] * 4, "loop": [0.12] * 8}  # as on an idle machine
    assert demo.Line.of("x", microseconds).faster == "2.00x"


def test_results_that_differ_are_called_wrong():
    demo = load("demo")
    assert demo.agreement([torch.ones(4)], [torch.ones(4) + 0.001]) == "ok"
    assert demo.agreement([torch.ones(4), torch.ones(4)], [torch.ones(4), torch.zeros(4) + 2]).startswith("WRONG")


def test_layer_of_transformers_is_compared_too():
    pytest.importorskip("transformers")
    demo = load("demo")
    lines = demo.beside_transformers(demo.read_catalogue()["demo"], 8, "cpu")
    assert [operation.check for operation in lines] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("nvidia_smi", "advice"),
    [
        ("echo 7.5; echo 9.0", "put nvcc 13.0 or newer on the path"),
        ("echo 7.5; echo 6.1", "compute capability 8.0 or newer is needed, it has 7.5"),
        ("echo NVIDIA-SMI has failed; exit 9", "nvidia-smi lists no GPU"),
        (None, "nvidia-smi is not on the path to say which GPU it is: `make demo CUDA=ON`"),
    ],
)
def test_demo_says_what_a_gpu_that_is_not_used_lacks(nvidia_smi, advice, tmp_path, monkeypatch):
    if nvidia_smi:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    why = load("demo").why_not_the_gpu({"why_no_gpu": "this library was built without CUDA"})
    assert why.startswith(f"this library was built without CUDA: {advice}")


def test_demo_says_what_a_torch_without_cuda_lacks():
    assert "install one" in load("demo").why_not_the_gpu({"why_no_gpu": ""})


def test_one_slow_step_decides_no_speed():
    training = load("train_moe").Training.__new__(load("train_moe").Training)
    training.tokens, training.seconds = 100, [50.0, 1.0, 1.0, 30.0, 1.0, 1.0]
    assert training.tokens_per_second == 100
