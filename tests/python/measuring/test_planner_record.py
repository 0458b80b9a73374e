"""moegemm-bench --planner: what it counts, and a run on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
from moegemm.bench import cli, planner
from moegemm.bench.cases import OPS, read_catalogue


def entry(op: str, reached: float, **more: Any) -> dict[str, Any]:
    us = {"small": 100.0, "large": 100.0 * reached}
    best = "large" if reached < 1 else "small"
    made = {"model": "demo", "tokens": 64, "op": op, "heuristic": "small", "best": best, "us": us}
    return made | {"reached": reached, "only_kernel": False, "seconds": 0.1} | more


def test_problems_with_one_kernel_and_skipped_ones_do_not_flatter_the_mean():
    entries = [
        entry("fwd1", 0.81),
        entry("dx1", 1.0),
        entry("dw1", 1.0, us={}, only_kernel=True),
        entry("fwd2", 1.0, us={}, skipped="no kernel was timed within the budget"),
    ]
    text = "\n".join(planner.quality_lines(entries))
    assert "**0.900** of the best kernel's over the 2 problems" in text
    assert "over all 3" in text
    assert "**0.810** at demo fwd1" in text
    assert "1 problems were not timed" in text
    run = {"gpu": "NVIDIA H200", "dtype": "bf16", "date": "2026-01-01", "commit": "abc", "budget_seconds": 2.0}
    page = planner.to_markdown({"run": run, "cases": entries})
    assert "| demo | fwd1 | **0.81** |" in page
    assert "| demo | fwd1 | 64 | small | large | 100.0 | 81.0 | 0.810 |" in page


def test_the_whole_catalogue_is_asked():
    models = list(read_catalogue().values())
    cases = planner.cases_of(models, planner.TOKENS)
    assert len(cases) == len(set(cases)) == len(models) * len(planner.TOKENS) * len(OPS)


def test_run_on_the_cpu_writes_table_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["--planner", "--device", "cpu", "--models", "demo", "--tokens", "2", "--budget", "0.2"]
    assert cli.main([*arguments, "--commit", "abc", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "planner.json").read_text())
    assert [c["op"] for c in record["cases"]] == ["fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2"]
    by_op = {c["op"]: c for c in record["cases"]}
    assert by_op["fwd1"]["only_kernel"]
    assert len(by_op["dx1"]["us"]) == 3
    assert 0 < by_op["dx1"]["reached"] <= 1
    assert "commit abc" in (tmp_path / "planner.md").read_text()


def test_published_models_are_in_the_catalogue():
    wanted = {
        "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "deepseek-v3",
        "kimi-k2", "llama4-scout", "llama4-maverick", "gpt-oss-20b", "gpt-oss-120b", "olmoe", "glm-4.5",
    }  # fmt: skip
    assert wanted <= set(read_catalogue())
