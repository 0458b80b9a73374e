"""The program `moegemm` in a Python environment."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from moegemm import program
from terminal import on_terminal

ROOT = Path(__file__).parents[3]
IN_PYTHON = [sys.executable, "-m", "moegemm"]
BUILT = ROOT / "build" / "release" / "src" / "cli" / "moegemm"
PROGRAM = [str(BUILT)] if BUILT.is_file() else IN_PYTHON
# A driver of 2023, as far as one looks for its version.
OLD_DRIVER = """
int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int* version) { *version = 12020; return 0; }
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    where = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    return subprocess.run(command, env=where, capture_output=True, text=True, timeout=300, check=False)


def test_exit_code_output_and_errors_are_those_of_the_program():
    done = run(*IN_PYTHON, "run", "gpt-2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moegemm run: preset: no model is called gpt-2")


def test_warnings_of_the_library_go_to_stderr(tmp_path):
    (tmp_path / "tuning.json").write_text("{")
    done = run(*IN_PYTHON, "cache", "show", MOEGEMM_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0
    assert "moegemm: warning: the tuning cache" in done.stderr


@pytest.mark.parametrize(("columns", "most"), [(0, 79), (60, 59)])
def test_progress_fits_into_one_line_of_the_terminal(columns, most, tmp_path):
    layer = [
        "tune",
        "--budget",
        "0.05",
        "--experts",
        "4",
        "--topk",
        "2",
        "--hidden",
        "64",
        "--intermediate",
        "64",
        "--tokens",
        "8",
    ]
    where = {"PYTHONPATH": str(ROOT / "python"), "MOEGEMM_CACHE_DIR": str(tmp_path)}
    shown = on_terminal(*PROGRAM, *layer, columns=columns, **where)
    lines = [part for part in re.split(r"[\r\n]|\x1b\[2K", shown) if part.startswith("[")]
    assert lines
    assert max(map(len, lines)) <= most


def test_gpu_with_an_old_driver_says_what_to_do(tmp_path):
    if "without CUDA" in run(*PROGRAM, "info").stdout:
        pytest.skip("no CUDA kernels are compiled in")
    stub = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(stub, input=OLD_DRIVER, text=True, check=True)
    done = run(*PROGRAM, "info", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0
    assert re.search(r"^gpu .*the driver is for CUDA 12\.2, this library needs one for CUDA \d+\.0", done.stdout, re.M)
    assert "update the driver" in done.stdout


def test_library_without_the_program_says_so(tmp_path, monkeypatch, capsys):
    library = tmp_path / "libempty.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "/dev/null"], check=True)
    monkeypatch.setattr(program, "found_library", lambda: library)
    with pytest.raises(SystemExit) as stop:
        program.main()
    assert stop.value.code == 3
    assert "libempty.so was built without the program: " in capsys.readouterr().err


def test_make_puts_programs_and_package_of_the_checkout_into_its_environment(tmp_path):
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = tmp_path / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    folders = {sysconfig.get_path("purelib"), str(Path(torch.__file__).parents[1])}
    (site / "torch_of_the_tests.pth").write_text("\n".join(folders) + "\n")
    for _ in range(2):  # each build does it again
        subprocess.run([ROOT / "scripts" / "link_programs", tmp_path, "build/release"], check=True)
    assert (tmp_path / "bin" / "moegemm").readlink() == ROOT / "build" / "release" / "src" / "cli" / "moegemm"
    assert run(str(tmp_path / "bin" / "moegemm-bench"), "--help").stdout.startswith("usage: moegemm-bench")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    found = [python, "-c", "import moegemm; print(moegemm.__file__)"]
    shown = subprocess.run(found, env=clean, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(ROOT / "python" / "moegemm" / "__init__.py")
    makefile = (ROOT / "Makefile").read_text()
    for goal in ("build", "build-demo"):
        assert "@scripts/link_programs $(VENV) $(BUILD)" in makefile.split(f"\n{goal}: ")[1].split("\n\n")[0]
