"""moegemm-bench --planner: what it counts, and a run on the CPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moegemm.bench import cli
from moegemm.bench.cases import OPS, ROUTINGS, read_catalogue
from moegemm.bench.kinds import planner
from moegemm.bench.operands import bytes_needed


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
    assert "mean: **0.900** over the problems with a choice, " in text
    assert "over all 3" in text
    assert "**0.810** of the best kernel's, at demo fwd1, 64 tokens, random routing" in text
    assert "Below 0.95: **1** of the 2 problems" in text
    assert "torch" not in text
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


RUN = {"gpu": "NVIDIA H200", "dtype": "bf16", "date": "2026-01-01", "commit": "abc", "budget_seconds": 0.25}


def test_the_page_shows_the_worst_problems_and_no_more():
    model = {"name": "demo", "experts": 8, "topk": 2, "hidden": 64, "intermediate": 32}
    entries = [entry("fwd1", 0.5 + tokens / 100, tokens=tokens) for tokens in range(1, 41)]
    page = planner.to_markdown({"run": RUN, "models": {"demo": model}, "cases": entries})
    rows = [line for line in page.splitlines() if line.startswith("| demo ")]
    assert rows[0] == "| demo | 8/2, 64 x 32 | fwd1 | random | 1 | small | large | 100.0 | 51.0 | 0.510 |"
    assert len(rows) == planner.SHOWN < len(entries)
    assert "Layers drawn" not in page


def test_what_torch_is_faster_at_is_counted_and_shown():
    entries = [
        entry("fwd1", 1.0, ours_us=100.0, torch_us=120.0),
        entry("fwd2", 1.0, ours_us=100.0, torch_us=130.0),
        entry("dw1", 1.0, us={}, only_kernel=True, routing="zipf", ours_us=100.0, torch_us=90.0),
        entry("dx1", 1.0),
    ]
    text = "\n".join(planner.quality_lines(entries))
    assert "Slower than torch + copies: **1** of 3 problems" in text
    assert "0.900 times torch's speed, at demo dw1, 64 tokens, zipf routing" in text
    page = planner.to_markdown({"run": RUN, "cases": entries})
    assert "| demo |  | dw1 | zipf | 64 | small | 100.0 | 90.0 | 0.900 |" in page


def test_a_share_that_is_too_low_is_measured_again(monkeypatch: pytest.MonkeyPatch):
    shares = [0.80, 0.97, 0.99]
    monkeypatch.setattr(planner, "_tune", lambda *_: entry("fwd1", shares.pop(0)))
    case = planner.layer_cases(1, 1, planner.ON_CPU)[0]
    settings = planner.Settings("cpu", torch.float32, budget=0.1, deadline=float("inf"))
    kept: list[dict[str, Any]] = []
    assert planner.measure([case, case], settings, kept.append) == 0
    assert [e["reached"] for e in kept] == [0.97, 0.99]


def test_a_deadline_ends_the_measurement():
    cases = planner.layer_cases(2, 1, planner.ON_CPU)
    settings = planner.Settings("cpu", torch.float32, budget=0.1, deadline=0.0)
    assert planner.measure(cases, settings, lambda _: pytest.fail("too late")) == len(cases)


def test_the_whole_catalogue_is_asked():
    models = list(read_catalogue().values())
    cases = planner.cases_of(models, planner.TOKENS)
    assert len(cases) == len(set(cases)) == len(models) * len(planner.TOKENS) * len(OPS)


def test_layers_follow_from_their_seed():
    cases = planner.layer_cases(40, 3, planner.ON_GPU)
    assert cases == planner.layer_cases(40, 3, planner.ON_GPU)
    assert cases[: 12 * len(OPS)] == planner.layer_cases(12, 3, planner.ON_GPU)
    assert cases != planner.layer_cases(40, 4, planner.ON_GPU)


def test_layers_lie_within_their_ranges_and_reach_their_ends():
    cases = planner.layer_cases(500, 5, planner.ON_GPU)
    layers = [cases[i : i + len(OPS)] for i in range(0, len(cases), len(OPS))]
    for layer in layers:
        model = layer[0].model
        assert [case.op for case in layer] == list(OPS)
        assert len({(case.model, case.tokens, case.routing) for case in layer}) == 1
        assert 4 <= model.experts <= 512
        assert 1 <= model.topk <= min(12, model.experts)
        assert 1 <= layer[0].tokens <= 32768
        for width in (model.hidden, model.intermediate):
            assert 256 <= width <= 16384
            assert width % 8 == 0
        assert 6 * model.experts * model.hidden * model.intermediate <= 16 << 30
        assert all(bytes_needed(case) <= 60 << 30 for case in layer)
    models = [layer[0].model for layer in layers]
    assert len({model.name for model in models}) == len(layers) == 500
    assert {layer[0].routing for layer in layers} == set(ROUTINGS)
    assert {model.topk for model in models} == set(range(1, 13))
    assert any(model.hidden % 16 for model in models)
    assert max(model.hidden for model in models) > 12000
    assert min(model.hidden for model in models) < 300
    assert max(layer[0].tokens for layer in layers) > 24000
    assert min(layer[0].tokens for layer in layers) == 1


def test_run_on_the_cpu_writes_table_and_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["--planner", "--device", "cpu", "--models", "demo", "--tokens", "2", "--budget", "20"]
    arguments += ["--layers", "1", "--seed", "7", "--beside-torch", "--commit", "abc", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    record = json.loads((tmp_path / "planner.json").read_text())
    assert [c["op"] for c in record["cases"]] == ["fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2"]
    by_op = {c["op"]: c for c in record["cases"]}
    assert by_op["fwd1"]["only_kernel"]
    assert len(by_op["dx1"]["us"]) == 3
    assert 0 < by_op["dx1"]["reached"] <= 1
    text = (tmp_path / "planner.md").read_text()
    assert record["run"]["commit"] == "abc"
    layers = record["held_out"]
    assert layers["seed"] == 7
    assert [c["op"] for c in layers["cases"]] == [c["op"] for c in record["cases"]]
    assert layers["models"] == [vars(planner.layer_cases(1, 7, planner.ON_CPU)[0].model)]
    assert all(c["ours_us"] > 0 and c["torch_us"] > 0 for c in (*layers["cases"], *record["cases"]))
    assert "1 layers, drawn with seed 7" in text
    assert "Slower than torch + copies" in text
    appended = [*arguments, "--append", str(tmp_path / "planner.json")]
    assert cli.main(appended) == 0, "nothing is left to measure"
    assert json.loads((tmp_path / "planner.json").read_text())["cases"] == record["cases"]
    with pytest.raises(SystemExit, match="layers"):
        cli.main([*appended, "--seed", "8"])


def test_published_models_are_in_the_catalogue():
    wanted = {
        "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "deepseek-v3",
        "kimi-k2", "llama4-scout", "llama4-maverick", "gpt-oss-20b", "gpt-oss-120b", "olmoe", "glm-4.5",
    }  # fmt: skip
    assert wanted <= set(read_catalogue())
