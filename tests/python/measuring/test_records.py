"""The records that the repository keeps: small, and as the programs write them."""

import contextlib
import json
import os
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from moegemm.bench.kinds import planner
from moegemm.bench.pages import report
from moegemm.bench.record import load_record, read_to_render, small_form, to_text, write_json

ROOT = Path(__file__).resolve().parents[3]
RECORDS = ROOT / "docs" / "benchmarks"
PLANNER = ROOT / "tests" / "data" / "planner.json"
KEPT = [*sorted(RECORDS.rglob("*.json")), PLANNER]
PROGRAMS = {
    "hopper/hopper": ("grouped_gemm.py", "--stem", "hopper"),
    "sm80/hopper-sm80": ("grouped_gemm.py", "--stem", "hopper-sm80"),
    "peers/peers": ("grouped_gemm.py", "--stem", "peers"),
    "paths/paths": ("paths.py",),
    "layer/moe_layer": ("moe_layer.py",),
    "layer/fused_activation": ("fused_activation.py",),
    "layer/lora": ("grouped_gemm.py", "--stem", "lora"),
    "quantised/quantised": ("grouped_gemm.py", "--stem", "quantised"),
    "quantised/finetune": ("finetune_quantised.py",),
    "rows/row_layouts": ("row_layouts.py",),
    "rows/expert_parallel": ("expert_parallel.py",),
    "cpu/cpu": ("cpu_vs_torch.py",),
}


def measured() -> dict[str, Any]:
    right = {
        "correct": True,
        "error": 0.0016632,
        "error_limit": 0.0117,
        "ms": 0.60083198,
        "ms_p10": 0.59,
        "ms_p90": 0.6,
    }
    wrong = right | {"correct": False}
    case = {"op": "fwd1", "n": 1536, "k": 2048, "flops": 4e11, "contenders": {"ours": right, "torch": wrong}}
    return {"run": {"commit": "abc"}, "cases": [case, case]}


def test_the_small_form_keeps_medians_and_the_errors_of_wrong_results():
    small = small_form(measured())
    contenders = small["cases"][0]["contenders"]
    assert contenders["ours"] == {"ms": 0.600832}
    assert contenders["torch"] == {"correct": False, "error": 0.0016632, "ms": 0.600832}
    assert small["run"] == {"commit": "abc"}
    assert small_form(small) == small


def test_a_record_has_a_line_for_each_case():
    record = measured() | {"held_out": {"seed": 1, "cases": measured()["cases"]}}
    text = to_text(record)
    assert json.loads(text) == record
    assert sum(line.startswith('{"op":"fwd1"') for line in text.splitlines()) == 4


def test_a_result_of_nan_does_not_lose_the_run(tmp_path: Path):
    write_json({"cases": [{"correct": False, "error": float("nan"), "ms": 1.5}]}, tmp_path, "record")
    (case,) = read_to_render(tmp_path / "record.json", tmp_path, "record")["cases"]
    assert case["ms"] == 1.5
    assert case["error"] != case["error"]


def test_rendering_elsewhere_leaves_the_measured_record_whole(tmp_path: Path):
    source = tmp_path / "measured"
    write_json(measured(), source, "record")
    before = (source / "record.json").read_text()
    assert read_to_render(source / "record.json", source, "record") == small_form(measured())
    assert (source / "record.json").read_text() == before
    read_to_render(source / "record.json", tmp_path / "kept", "record")
    assert json.loads((tmp_path / "kept" / "record.json").read_text()) == small_form(measured())


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_records_have_the_small_form(path: Path):
    text = path.read_text()
    assert to_text(small_form(json.loads(text))) + "\n" == text


def test_every_kept_record_has_a_program_that_renders_it():
    names = {path.relative_to(RECORDS).with_suffix("").as_posix() for path in RECORDS.rglob("*.json")}
    assert names <= set(PROGRAMS)
    script = (ROOT / "scripts" / "record_benchmarks").read_text()
    for name, command in PROGRAMS.items():
        assert f"record {name} benchmarks/{' '.join(command)}\n" in script


@pytest.mark.parametrize("name", ["hopper/hopper", "peers/peers", "sm80/hopper-sm80"])
def test_pages_of_products_say_what_their_record_says(name: str):
    path = RECORDS / name
    page = path.with_suffix(".md").read_text()
    record = load_record(path.with_suffix(".json"))
    drawn = {"": "TFLOP/s by model", "-tokens": "TFLOP/s over rows", "-decode": "Bandwidth of decoding"}
    drawn["-roofline"] = "Every product under the roofline"
    figures = [line for line in page.splitlines() if line.startswith("![")]
    listed = [tuple(reversed(line.removeprefix("![").removesuffix(")").split("]("))) for line in figures]
    assert page == report.to_markdown(record, listed)
    for file, what in listed:
        assert what.startswith(drawn[file.removesuffix(".png").removeprefix(path.name)])


def test_the_planners_page_says_what_its_record_says():
    page = (RECORDS / "planner" / "planner.md").read_text()
    assert page == planner.to_markdown(json.loads(PLANNER.read_text()))


def settings() -> dict[str, str]:
    """The library's own; imported packages set some of theirs."""
    return {name: value for name, value in os.environ.items() if name.startswith("MOEGEMM_")}


@pytest.mark.parametrize(
    "name", ["paths/paths", "layer/moe_layer", "layer/fused_activation", "quantised/finetune", "cpu/cpu"]
)
def test_scripts_render_the_page_that_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if name in ("layer/moe_layer", "quantised/finetune"):
        pytest.importorskip("transformers")
    if name == "quantised/finetune":
        pytest.importorskip("peft")
    program = ROOT / "benchmarks" / PROGRAMS[name][0]
    source = (RECORDS / name).with_suffix(".json")
    monkeypatch.setattr(sys, "argv", [program.name, "--render", str(source), "--out", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))  # scripts add their folder
    before, modules = settings(), set(sys.modules)
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_path(str(program), run_name="__main__")
        assert settings() == before, "rendering chooses no backend for the rest of the process"
    finally:
        for module in [m for m in sys.modules if m.split(".")[0] == "layer" and m not in modules]:
            del sys.modules[module]
    stem = Path(name).name
    for suffix in (".md", ".json"):
        assert (tmp_path / stem).with_suffix(suffix).read_text() == (RECORDS / name).with_suffix(suffix).read_text()


def test_the_readme_says_how_fast_packed_weights_are():
    readme = " ".join((ROOT / "README.md").read_text().split())
    times: dict[bool, list[float]] = {True: [], False: []}
    for case in json.loads((RECORDS / "quantised" / "quantised.json").read_text())["cases"]:
        if case["tokens"] in (16, 64, 8192):
            ms = {name: found["ms"] for name, found in case["contenders"].items()}
            times[case["tokens"] == 8192] += [ms["bf16"] / ms[name] for name in case["same_bits"]]
    few, many = (f"{min(found):.{digits}f} to {max(found):.{digits}f} times" for found, digits in
                 ((times[False], 1), (times[True], 2)))  # fmt: skip
    assert f"are {few} as fast as bf16 at 16 and 64 tokens, but {many} at 8192" in readme


def test_the_readme_says_what_the_record_says():
    readme = " ".join((ROOT / "README.md").read_text().split())
    cases = load_record(RECORDS / "hopper" / "hopper.json")["cases"]
    headline = {(c["model"], c["op"]): c for c in cases if (c["tokens"], c["routing"]) == (8192, "random")}
    for model in dict.fromkeys(model for model, _ in headline):
        shown = [headline[model, op] for op in ("fwd1", "fwd2", "dx1", "dx2", "dw1", "dw2")]
        cells = [f"{report.tflops(c, 'ours'):.0f} ({report.speedup(c, 'torch'):.2f}x)" for c in shown]
        assert f"| {model} | {' | '.join(cells)} |" in readme
    ratios = [report.speedup(c, "torch") for c in cases]
    assert f"in {sum(r >= 1 for r in ratios)} of {len(ratios)} cases" in readme
    assert f"{statistics.geometric_mean(ratios):.2f} times in the geometric mean" in readme
    assert f"up to {100 * (1 - min(ratios)):.1f} % slower" in readme
