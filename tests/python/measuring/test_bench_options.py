"""moegemm-bench refuses what it cannot do before it measures: the argument, the value and the rule."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from moegemm.bench import cli

PROGRAMS = Path(__file__).resolve().parents[3] / "benchmarks"

REFUSED = {
    "--rounds 0": "argument --rounds: '0'; a number of at least 1 is accepted",
    "--tokens 16,a": "argument --tokens: '16,a'; a comma-separated list of positive numbers is accepted",
    "--tokens 0": "argument --tokens: '0'; a comma-separated list of positive numbers is accepted",
    "--models nosuch": "argument --models: 'nosuch'; accepted are demo,",
    "--ops fwd9": "argument --ops: 'fwd9'; accepted are fwd1,dx1,dw1,fwd2,dx2,dw2",
    "--seconds nan": "argument --seconds: 'nan'; a number of seconds is accepted",
    "--heat -1": "argument --heat: '-1'; a number of seconds is accepted",
    "--planner --layers 0": "argument --layers: '0'; a number of at least 1 is accepted",
    "--planner --lora": "argument --lora: not allowed with argument --planner",
    "--quantised --formats mxfp4,foo": "argument --formats: w_format is 'foo'; accepted are mxfp4, fp8/128x128",
    "--formats mxfp4": "argument --formats: it goes with --quantised",
    "--beside-torch": "argument --beside-torch: it goes with --planner",
    "--lora --ops fwd1": "argument --ops: --lora does not read it",
    "--quantised --dtype fp16": "argument --dtype: --quantised does not read it",
    "--planner --routing zipf": "argument --routing: --planner does not read it",
    "--render nosuch.json": "argument --render: nosuch.json is no file",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_do_nothing_or_make_no_sense_is_refused(line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.read_options(["--device", "cpu", *line.split()], None)
    assert ended.value.code == 2
    assert REFUSED[line] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["paths.py", "row_layouts.py", "fused_activation.py", "expert_parallel.py"])
def test_programs_refuse_numbers_and_devices_before_they_measure(name, monkeypatch, capsys, tmp_path):
    def run(*options: str) -> object:
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PROGRAMS / name), run_name="__main__")
        return ended.value.code

    assert run("--rounds", "0") == 2
    assert "argument --rounds: '0'; a number of at least 1 is accepted" in capsys.readouterr().err
    if not torch.cuda.is_available():
        device = () if name in ("paths.py", "row_layouts.py") else ("--device", "cuda")
        assert "torch sees no CUDA device" in str(run(*device))
    assert list(tmp_path.iterdir()) == []
