"""What a record was measured on."""

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import moegemm


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit_of(folder: Path) -> str:
    return _answer("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD") or "unknown"


def gpu_state() -> str:
    """Clock, power, temperature: what tells a hot card from a cool one."""
    return _answer("nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader")


def describe(device: str, dtype: str, rounds: int, commit: str) -> dict[str, Any]:
    cuda = device == "cuda"
    described = moegemm.info()
    cpu = described["cpu"]
    gpu = torch.cuda.get_device_name() if cuda else f"{cpu['model']} ({cpu['isa']}, {torch.get_num_threads()} threads)"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit,
        "version": described["version"],
        "build": described["build"],
        "device": device,
        "gpu": gpu,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
        "gpu_state_at_start": gpu_state(),
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "dtype": dtype,
        "rounds": rounds,
        "under_load": cuda,
    }
