"""Every kind of call has the bits that tests/data keeps. Who means to change them writes the file anew:

MOEGEMM_CPU_ISA=avx2 PYTHONPATH=python python scripts/output_hashes.py --trim > tests/data/output_hashes.txt
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import moegemm
import pytest

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "tests" / "data" / "output_hashes.txt"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines round sums in other places")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_kind_of_call_keeps_its_bits(backend: str):
    if moegemm.info()["cpu"]["isa"] == "portable":
        pytest.skip("the hashes are those of AVX2")
    command = [sys.executable, str(ROOT / "scripts" / "output_hashes.py"), "--trim", "--backend", backend]
    environment = os.environ | {
        "MOEGEMM_CPU_ISA": "avx2", "MOEGEMM_BACKEND": backend, "PYTHONPATH": str(ROOT / "python"),
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    kept = [line for line in KEPT.read_text().splitlines() if line.split()[1] == backend]
    assert len(kept) > 200
    assert [line for line in done.stdout.splitlines() if line not in kept] == []
    assert len(done.stdout.splitlines()) == len(kept)
