"""The program `moegemm` in a Python environment, and the README's commands for it."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from moegemm import program

ROOT = Path(__file__).parents[3]
IN_PYTHON = [sys.executable, "-m", "moegemm"]
# The layers of the README at toy size: of a flag given twice the last one counts.
SMALL = "--experts 8 --topk 2 --hidden 64 --intermediate 32 --tokens 16"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    where = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    return subprocess.run(command, env=where, capture_output=True, text=True, timeout=300, check=False)


def printed_commands() -> list[str]:
    section = (ROOT / "README.md").read_text().split("## From the shell\n")[1].split("\n## ")[0]
    found = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert found, "the section has no shell block"
    lines = [line.split(" # ")[0].strip() for line in found[1].splitlines()]
    return [line for line in lines if line.startswith("moegemm ")]


@pytest.mark.parametrize("line", printed_commands())
def test_command_of_the_readme_works(line, tmp_path):
    small = SMALL if line.split()[1] in ("plan", "tune", "run") else ""
    done = run(*IN_PYTHON, *shlex.split(f"{line} {small}")[1:], MOEGEMM_CACHE_DIR=str(tmp_path))
    if "no CUDA kernels are compiled in" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_exit_code_output_and_errors_are_those_of_the_program():
    done = run(*IN_PYTHON, "run", "gpt-2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moegemm run: preset: no model is called gpt-2")


def test_warnings_of_the_library_go_to_stderr(tmp_path):
    (tmp_path / "tuning.json").write_text("{")
    done = run(*IN_PYTHON, "cache", "show", MOEGEMM_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0
    assert "moegemm: warning: the tuning cache" in done.stderr


def test_library_without_the_program_says_so(tmp_path, monkeypatch, capsys):
    library = tmp_path / "libempty.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "/dev/null"], check=True)
    monkeypatch.setattr(program, "candidates", lambda: [library])
    with pytest.raises(SystemExit) as stop:
        program.main()
    assert stop.value.code == 3
    assert "libempty.so was built without the program: " in capsys.readouterr().err


def test_make_puts_the_programs_of_the_checkout_on_the_path_of_its_environment(tmp_path):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for _ in range(2):  # each build does it again
        subprocess.run([ROOT / "scripts" / "link_programs", tmp_path], check=True)
    assert (tmp_path / "bin" / "moegemm").readlink() == ROOT / "build" / "release" / "src" / "cli" / "moegemm"
    assert run(str(tmp_path / "bin" / "moegemm-bench"), "--help").stdout.startswith("usage: moegemm-bench")
    makefile = (ROOT / "Makefile").read_text()
    assert "@scripts/link_programs $(VENV)" in makefile.split("\nbuild: ")[1].split("\n\n")[0]
