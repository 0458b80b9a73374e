"""The examples on transformers models run at toy size."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import NO_CUDA

pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# In this process: most of the program's time would be the import of transformers.
@pytest.mark.parametrize("options", [[], ["--freeze-experts", "--checkpointing"]])
def test_finetuning_lowers_the_loss(options, monkeypatch, capsys):
    pytest.importorskip("accelerate")
    monkeypatch.setattr(sys, "argv", ["finetune_moe.py", "--steps", "24", *options])
    runpy.run_path(str(EXAMPLES / "finetune_moe.py"), run_name="__main__")
    assert "in 24 steps" in capsys.readouterr().out


def test_lora_lowers_the_loss_and_compares_itself_with_peft(monkeypatch, capsys):
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["finetune_lora.py", "--steps", "30"])
    runpy.run_path(str(EXAMPLES / "finetune_lora.py"), run_name="__main__")
    shown = capsys.readouterr().out
    lines = {
        line.split("  ")[0]: line.split()
        for line in shown.splitlines()
        if line.startswith(("moegemm  ", "PEFT's own path  "))
    }
    assert set(lines) == {"moegemm", "PEFT's own path"}
    kept = [float(lines[way][-3]) for way in lines]
    assert kept[0] < kept[1]
    assert float(lines["moegemm"][-1]) == pytest.approx(float(lines["PEFT's own path"][-1]), abs=0.1)
    assert shown.count("|") >= 8  # the curve


def test_generation_counts_its_tokens():
    assert "tokens per second" in run("generate_moe.py", "--eager", "--tokens", "8")


@NO_CUDA
def test_generation_with_a_cuda_graph_gives_the_tokens_of_eager():
    assert "100% of the tokens are those of eager" in run("generate_moe.py", "--device", "cuda", "--tokens", "24")


def test_adapters_beside_quantised_experts_lower_the_loss(monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.setattr(sys, "argv", ["finetune_quantized.py", "--steps", "12", "--tokens", "128"])
    runpy.run_path(str(EXAMPLES / "finetune_quantized.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "experts 0.00 GB packed" in shown
    assert "peak memory" in shown


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("generate_moe.py --tokens 2", "--tokens is 2; it must be at least 3"),
        ("generate_moe.py --batch 0", "--batch is 0; it must be at least 1"),
        ("finetune_moe.py --steps 0", "--steps is 0; it must be at least 1"),
        ("finetune_quantized.py --length 0", "--length is 0; it must be at least 2"),
        ("finetune_quantized.py --tokens 31", "--tokens is 31; it must be at least 32"),
        ("demo.py --tokens 0", "--tokens is 0; it must be at least 1"),
        ("demo.py --steps -1", "--steps is -1; it must be at least 1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(line, refused, monkeypatch, capsys):
    name, *options = line.split()
    if name == "finetune_quantized.py":
        pytest.importorskip("peft")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the demo adds folders
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert ended.value.code == 2
    assert refused in capsys.readouterr().err
