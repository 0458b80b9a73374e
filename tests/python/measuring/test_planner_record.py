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
    assert "Scratch memory" not in text
    told = [
        entry("fwd1", 1.0, memory_bytes=3 << 30, operand_sets=1, flushed=False),
        entry("dx1", 1.0, memory_bytes=130 << 20, operand_sets=4, flushed=False),
        entry("dx2", 1.0, memory_bytes=140 << 20, operand_sets=1, flushed=True),
    ]
    text = "\n".join(planner.quality_lines(told))
    assert "up to 3072 MiB. 1 problems smaller than twice L2 rotated through copies, with up to 130 MiB." in text
    assert "In 1 problems L2 was overwritten" in text
    run = {"gpu": "NVIDIA H200", "dtype": "bf16", "date": "2026-01-01", "commit": "abc", "budget_seconds": 2.0}
    page = planner.to_markdown({"run": run, "cases": entries})
    assert "| demo | fwd1 | **0.81** |" in page
    assert "| demo | fwd1 | 64 | small | large | 100.0 | 81.0 | 0.810 |" in page


def test_the_whole_catalogue_is_asked():
    models = list(read_catalogue().values())
    cases = planner.cases_of(models, planner.TOKENS)
    assert len(cases) == len(set(cases)) == len(models) * len(planner.TOKENS) * len(OPS)


def test_held_out_layers_follow_from_their_seed_and_are_not_the_catalogues():
    models = planner.held_out_models(40, seed=3)
    assert models == planner.held_out_models(40, seed=3)
    assert models[:12] == planner.held_out_models(12, seed=3)
    assert models != planner.held_out_models(40, seed=4)
    known = {(m.experts, m.hidden, m.intermediate) for m in read_catalogue().values()}
    for model in models:
        assert (model.experts, model.hidden, model.intermediate) not in known
        assert 1 <= model.topk <= model.experts
        assert model.hidden % 64 == model.intermediate % 32 == 0
        assert 6 * model.experts * model.hidden * model.intermediate <= 16 << 30
    assert not set(planner.HELD_OUT_TOKENS) & set(planner.TOKENS)


def test_run_on_the_cpu_writes_table_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["--planner", "--device", "cpu", "--models", "demo", "--tokens", "2", "--budget", "20"]
    arguments += ["--held-out", "1", "--seed", "7", "--commit", "abc", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    record = json.loads((tmp_path / "planner.json").read_text())
    assert [c["op"] for c in record["cases"]] == ["fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2"]
    by_op = {c["op"]: c for c in record["cases"]}
    assert by_op["fwd1"]["only_kernel"]
    assert len(by_op["dx1"]["us"]) == 3
    assert 0 < by_op["dx1"]["reached"] <= 1
    text = (tmp_path / "planner.md").read_text()
    assert record["run"]["commit"] == "abc"
    held_out = record["held_out"]
    assert held_out["seed"] == 7
    assert [c["op"] for c in held_out["cases"]] == [c["op"] for c in record["cases"]]
    model = held_out["models"][0]
    assert f"| held-out 1 | {model['experts']} | {model['topk']} | {model['hidden']} |" in text
    assert "seed 7" in text
    appended = [*arguments, "--append", str(tmp_path / "planner.json")]
    assert cli.main(appended) == 0, "nothing is left to measure"
    assert json.loads((tmp_path / "planner.json").read_text())["cases"] == record["cases"]
    with pytest.raises(SystemExit, match="held-out"):
        cli.main([*appended, "--seed", "8"])


def test_published_models_are_in_the_catalogue():
    wanted = {
        "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "deepseek-v3",
        "kimi-k2", "llama4-scout", "llama4-maverick", "gpt-oss-20b", "gpt-oss-120b", "olmoe", "glm-4.5",
    }  # fmt: skip
    assert wanted <= set(read_catalogue())
