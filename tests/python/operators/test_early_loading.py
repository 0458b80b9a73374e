"""Kernels are loaded in the background where the process uses a GPU, and nowhere else."""

import subprocess
import sys

import moegemm
import pytest
import torch
from conftest import NO_CUDA
from moegemm.operators.process import early_loading


def test_the_cpu_has_nothing_to_load():
    assert moegemm.load_kernels("cpu") == 0
    assert torch.ops.moegemm.load_kernels(12345) == 0  # no such GPU


def test_without_a_gpu_there_is_nothing_to_load(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert moegemm.load_kernels() == 0
    for device in ("cuda", torch.device("cuda:1")):
        with pytest.raises(RuntimeError, match=r"device is .*cuda.*; torch .* sees no CUDA device here"):
            moegemm.load_kernels(device)


def test_each_gpu_is_loaded_once_it_is_used(monkeypatch):
    asked: list[int] = []

    def load(device: int) -> int:
        asked.append(device)
        return 80 if device == 0 or asked.count(1) == 3 else 0

    monkeypatch.setattr(early_loading, "_load", load)
    early_loading.load_where_used(2)
    assert asked == [0, 1, 1, 1]


def test_gpus_that_stay_unused_are_given_up(monkeypatch):
    monkeypatch.setattr(early_loading, "_load", lambda device: 0)
    monkeypatch.setattr(early_loading, "PATIENCE_SECONDS", 0.05)
    early_loading.load_where_used(1)


def test_a_gpu_that_cannot_load_is_left_alone(monkeypatch):
    def load(device: int) -> int:
        raise RuntimeError("could not load a kernel")

    monkeypatch.setattr(early_loading, "_load", load)
    early_loading.load_where_used(1)


@pytest.mark.parametrize(("switch", "started"), [("0", 0), ("1", 1)])
def test_it_starts_with_cuda_unless_switched_off(monkeypatch, switch, started):
    queued: list[object] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setenv("MOEGEMM_LOAD_EARLY", switch)
    early_loading.load_early()
    assert len(queued) == started


IMPORTED_FIRST = """
import threading, torch, moegemm
assert not torch.cuda.is_initialized()
torch.zeros(1, device="cuda")
(loading,) = [t for t in threading.enumerate() if t.name == "moegemm-load"] or [None]
if loading is not None and torch.cuda.device_count() == 1:
    loading.join(30)
    assert not loading.is_alive()
assert moegemm.load_kernels() > 20
"""


@NO_CUDA
def test_importing_touches_no_gpu_and_using_one_loads():
    subprocess.run([sys.executable, "-c", IMPORTED_FIRST], check=True, timeout=120)
