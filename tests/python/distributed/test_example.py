"""The example runs under torchrun on CPUs and gives the loss curve of one process."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_expert_parallel.py"


def test_experts_on_ranks_learn_as_in_one_process(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(EXAMPLE), "--steps", "3", "--device", "cpu", "--tolerance", "1e-5", "--plot",
         str(tmp_path / "curves.png")],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 ranks" in done.stdout
    assert "(same within 1e-05)" in done.stdout
    assert "experts take 6.0 MiB on each rank, 12.0 on one" in done.stdout


def test_the_benchmark_of_what_surrounds_an_exchange_runs(tmp_path):
    program = EXAMPLE.parents[1] / "benchmarks" / "expert_parallel.py"
    sizes = ["--tokens", "16", "--experts", "8", "--ranks", "2", "--topk", "2", "--hidden", "16", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, str(program), *sizes, "--device", "cpu", "--out", str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| a row for each slot | 32 |" in done.stdout
    assert (tmp_path / "expert_parallel.md").read_text() in done.stdout
