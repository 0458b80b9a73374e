"""benchmarks/grouped_gemm.py without a GPU: the record's tables and picture, and a dry run of the measuring code."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moegemm
import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "grouped_gemm.py"
Run = Callable[..., tuple[Any, str]]


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def run_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The program in this process, with a smaller demo model: its status or last words, and what it told."""
    cli, cases = (importlib.import_module(f"moegemm.bench.{name}") for name in ("cli", "cases"))
    small = cases.read_catalogue() | {"demo": cases.Model("demo", 8, 2, 128, 64)}
    monkeypatch.setattr(cli, "read_catalogue", lambda: small)

    def run(*arguments: object) -> tuple[Any, str]:
        try:
            status = cli.main([str(argument) for argument in arguments], records=ROOT / "build" / "bench")
        except SystemExit as stop:
            status = stop.code
        return status, capsys.readouterr().err

    return run


def contender(flops: float, tflops: float, **more: Any) -> dict[str, Any]:
    ms = flops / tflops * 1e-9
    return {"correct": True, "error": 0.0017, "ms": ms, "ms_p10": 0.99 * ms, "ms_p90": 1.02 * ms} | more


def made_up_record() -> dict[str, Any]:
    """Every case of the default run, with rates that are a function of its place: 0.83 of dense, 1.5 times torch."""
    cases = importlib.import_module("moegemm.bench.cases")
    catalogue = cases.read_catalogue()
    models = [catalogue[name] for name in cases.DEFAULT_MODELS]
    listed = cases.ordered_cases(models, cases.DEFAULT_TOKENS, cases.ROUTINGS, cases.OPS)
    entries = []
    for i, case in enumerate(listed):
        experts, n, k = case.model.weight_shape(case.op)
        dense = 640.0 + 23 * (i % 7)
        ours = 0.83 * dense
        entries.append(
            {
                "model": case.model.name,
                "tokens": case.tokens,
                "routing": case.routing,
                "op": case.op,
                "rows": case.rows,
                "touched_experts": min(experts, case.rows),
                "weight_bytes": min(experts, case.rows) * n * k * 2,
                "flops": case.flops,
                "contenders": {
                    "dense": contender(case.flops, dense),
                    "torch": contender(case.flops, ours / 1.5),
                    "ours": contender(case.flops, ours),
                },
            }
        )
    run = {
        "gpu": "NVIDIA H200",
        "dtype": "bf16",
        "date": "2026-01-01",
        "commit": "0123456789ab",
        "torch": "2.11.0",
        "cuda": "13.0",
        "driver": "580",
        "rounds": 30,
    }
    copy = {name: {"ms": 0.08, "correct": True} for name in ("copy", "weighted", "plain")}
    return {
        "format": 1,
        "run": run,
        "models": {model.name: vars(model) for model in models},
        "cases": entries,
        "route": {"tokens": 8192, "topk": 8, "experts": 128, "correct": True, "ms": 0.0213},
        "combine": [
            {"model": "mixtral-8x7b", "tokens": 8192, "topk": 2, "columns": 4096, "bytes": 2e8, "contenders": copy}
        ],
    }


def find_entry(record: dict[str, Any], model: str, op: str, tokens: int = 8192) -> dict[str, Any]:
    wanted = (model, op, tokens, "random")
    return next(c for c in record["cases"] if (c["model"], c["op"], c["tokens"], c["routing"]) == wanted)


def table_row(text: str, *cells: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |"))


def test_render_writes_tables_and_pictures_from_json_alone(tmp_path: Path) -> None:
    source = tmp_path / "earlier.json"
    source.write_text(json.dumps(made_up_record()))
    done = run_script("--render", source, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "hopper.md").read_text()
    assert "![" in text
    assert table_row(text, "deepseek-v3", "fwd1").endswith("| 0.83 | 1.50 | 0.82 (1.25) | yes |")
    assert table_row(text, "mixtral-8x7b", "fwd1").endswith("| 0.83 | 1.50 | 1.00 (1.10) | **no** |")
    assert "21.3 microseconds (target 25: yes)" in text
    assert (tmp_path / "hopper.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.svg")), "one format for each picture"


def test_what_follows_from_the_model_is_left_out_of_the_small_form_and_derived_again() -> None:
    record = importlib.import_module("moegemm.bench.record")
    whole, small = made_up_record(), record.small_form(made_up_record())
    derived = {"rows", "flops", "weight_bytes"}
    assert not any(derived & set(case) for case in small["cases"])
    for got, told in zip(record.with_derived(small)["cases"], whole["cases"], strict=True):
        assert {key: got[key] for key in derived} == {key: told[key] for key in derived}


def test_wrong_failed_and_skipped_results_are_named_and_not_counted() -> None:
    report = importlib.import_module("moegemm.bench.pages.report")
    record = made_up_record()
    find_entry(record, "qwen3-30b-a3b", "fwd1")["contenders"]["ours"] |= {"correct": False, "error": 0.5}
    find_entry(record, "mixtral-8x7b", "dw1")["contenders"]["torch"] = {"correct": False, "failure": "no memory"}
    skipped = find_entry(record, "deepseek-v3", "fwd2", tokens=64)
    del skipped["touched_experts"]
    skipped |= {"contenders": {}, "skipped": "needs 200 GiB"}
    text = report.to_markdown(record)
    assert "**ours was wrong**: qwen3-30b-a3b fwd1, 8192 tokens, random routing: error 0.5" in text
    assert "torch failed: mixtral-8x7b dw1, 8192 tokens, random routing: no memory" in text
    assert "Not measured: deepseek-v3 fwd2, 64 tokens, random routing: needs 200 GiB" in text
    assert " | – | – | – | 0.85 (1.33) | – |" in table_row(text, "qwen3-30b-a3b", "fwd1")  # noqa: RUF001


def test_decode_ratio_is_against_reading_the_touched_weights_once() -> None:
    report = importlib.import_module("moegemm.bench.pages.report")
    entry = find_entry(made_up_record(), "qwen3-30b-a3b", "fwd1", tokens=64)
    floor_ms = entry["weight_bytes"] / 4.3e12 * 1e3
    entry["contenders"]["ours"]["ms"] = 1.08 * floor_ms
    assert report.meets_decode_target(entry)
    entry["contenders"]["ours"]["ms"] = 1.10 * floor_ms
    assert not report.meets_decode_target(entry)


def test_a_forced_backend_has_its_own_record_and_targets(tmp_path: Path, run_program: Run) -> None:
    record = made_up_record()
    record["run"]["backend"] = "sm80"
    for case in record["cases"]:
        case["backend"] = "sm80"
    fast = find_entry(record, "mixtral-8x7b", "dw1")
    fast["contenders"]["ours"] = contender(fast["flops"], 361.0)
    slow = find_entry(record, "mixtral-8x7b", "dx1")
    slow["contenders"]["ours"] = contender(slow["flops"], 399.0)
    source = tmp_path / "earlier.json"
    source.write_text(json.dumps(record))
    status, told = run_program("--render", source, "--out", tmp_path)
    assert status == 0, told
    text = (tmp_path / "hopper-sm80.md").read_text()
    assert "sm80 backend" in text.splitlines()[0]
    assert table_row(text, "mixtral-8x7b", "dw1").endswith("| 360 | yes |")
    assert table_row(text, "mixtral-8x7b", "dx1").endswith("| 400 | **no** |")
    decode = importlib.import_module("moegemm.bench.pages.report").meets_decode_target
    entry = find_entry(record, "qwen3-30b-a3b", "fwd1", tokens=64)
    entry["contenders"]["ours"]["ms"] = 1.2 * entry["weight_bytes"] / 4.3e12 * 1e3
    assert decode(entry)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("cuda", "hopper/hopper"),
        ("cuda-sm80", "sm80/hopper-sm80"),
        ("cuda-sm90", "hopper/hopper-sm90"),
        ("cpu", "cpu/products"),
        ("planner", "planner/planner"),
    ],
)
def test_a_checkout_puts_each_record_in_its_folder(kind: str, place: str) -> None:
    cli = importlib.import_module("moegemm.bench.cli")
    folder, stem = cli.place_of(kind, Path("records"))
    assert folder / stem == Path("records") / place
    assert cli.place_of(kind, None) == (Path("moegemm-bench"), kind)


def test_a_record_can_have_a_name_and_a_place_of_its_own(tmp_path: Path) -> None:
    cli = importlib.import_module("moegemm.bench.cli")
    source = tmp_path / "earlier.json"
    source.write_text(json.dumps(made_up_record()))
    options = cli.read_options(["--render", str(source), "--out", "peers", "--stem", "peers"], Path("records"))
    assert (options.out, options.stem) == (Path("peers"), "peers")


def test_the_headline_comes_first_and_tiny_batches_have_no_gradients() -> None:
    cases = importlib.import_module("moegemm.bench.cases")
    models = list(cases.read_catalogue().values())[:3]
    listed = cases.ordered_cases(models, (1, 64, 512, 8192), ("zipf", "random"), cases.OPS)
    assert len(set(listed)) == len(listed)
    assert all(c.tokens == 8192 and c.routing == "random" for c in listed[: 3 * 6])
    assert [c.tokens for c in listed if c.routing == "random"][18] <= 64
    assert listed[-1].routing == "zipf"
    assert {c.op for c in listed if c.tokens == 1} == {"fwd1", "fwd2"}


@pytest.mark.parametrize("routing", ["random", "balanced", "zipf"])
def test_routing_sends_each_token_to_different_experts(routing: str) -> None:
    cases, operands = (importlib.import_module(f"moegemm.bench.{name}") for name in ("cases", "operands"))
    case = cases.Case(cases.read_catalogue()["qwen3-30b-a3b"], 300, routing, "fwd1")
    ids = operands.draw_experts(case, "cpu", seed=1)
    assert ids.shape == (300, 8)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    sizes = operands.Routing.of(ids, 128).sizes
    assert sum(sizes) == 300 * 8
    if routing == "balanced":
        assert max(sizes) - min(sizes) <= 1
    if routing == "zipf":
        assert max(sizes) > 4 * 300 * 8 / 128


def test_a_result_with_an_error_or_a_hole_fails_the_check() -> None:
    torch = importlib.import_module("torch")
    cases, operands, contenders = (
        importlib.import_module(f"moegemm.bench.{name}") for name in ("cases", "operands", "contenders")
    )
    case = cases.Case(cases.Model("tiny", 4, 2, 32, 16), 6, "random", "fwd2")
    weights = operands.make_weights(case, "cpu", torch.bfloat16)
    made = operands.make_operands(case, weights, "cpu", torch.bfloat16, seed=0)
    ours = contenders.ours(made)
    assert contenders.check(ours)["correct"]
    run = ours.run
    ours.run = lambda: run().mul_(1.05)
    assert not contenders.check(ours)["correct"]
    ours.run = lambda: made.out.copy_(torch.where(torch.arange(32) == 5, float("nan"), run()))
    assert contenders.check(ours)["fault"] == "elements are NaN or were not written"


def test_a_gradient_that_an_expert_without_rows_must_not_have_fails_the_check() -> None:
    torch = importlib.import_module("torch")
    cases, operands, contenders = (
        importlib.import_module(f"moegemm.bench.{name}") for name in ("cases", "operands", "contenders")
    )
    case = cases.Case(cases.Model("tiny", 8, 1, 32, 16), 4, "balanced", "dw1")
    made = operands.make_operands(case, None, "cpu", torch.bfloat16, seed=0)
    assert made.routing.sizes == [1, 1, 1, 1, 0, 0, 0, 0]
    ours = contenders.ours(made)
    assert contenders.check(ours)["correct"]
    run = ours.run
    ours.run = lambda: run().index_fill_(0, torch.tensor([4]), 1.0)
    assert not contenders.check(ours)["correct"]


def test_a_result_that_is_wrong_after_the_timed_rounds_ends_the_program_with_1(
    tmp_path: Path, run_program: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    contenders = importlib.import_module("moegemm.bench.contenders")
    make, calls = contenders.ours, []

    def wearing_out(*arguments: Any) -> Any:
        made = make(*arguments)
        run = made.run

        def run_worse() -> Any:
            calls.append(1)
            return run() if len(calls) == 1 else run().mul_(1.05)

        made.run = run_worse
        return made

    monkeypatch.setattr(contenders, "ours", wearing_out)
    status, told = run_program(
        "--device", "cpu", "--models", "demo", "--rounds", 1, "--out", tmp_path, "--no-peers", "--heat", 0,
        "--ops", "fwd1", "--tokens", 2,
    )  # fmt: skip
    assert status == 1, told
    (case,) = json.loads((tmp_path / "products.json").read_text())["cases"]
    assert not case["contenders"]["ours"]["correct"]
    assert "after the timed rounds" in case["contenders"]["ours"]["fault"]


def test_contenders_take_turns_in_an_order_that_changes() -> None:
    timing = importlib.import_module("moegemm.bench.timing")
    called: list[str] = []
    calls = {name: lambda name=name: called.append(name) for name in ("first", "second", "third")}
    times = timing.Clock("cpu", flush=False).round_robin(calls, 12, warm_up=False)
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys(calls, 12)
    rounds = [tuple(called[i : i + 3]) for i in range(0, 36, 3)]
    assert all(set(names) == set(calls) for names in rounds)
    assert len(set(rounds)) > 3


def test_dry_run_checks_every_contender_and_append_measures_what_is_missing(tmp_path: Path, run_program: Run) -> None:
    common = (
        "--device", "cpu", "--models", "demo", "--rounds", 1, "--commit", "abc", "--out", tmp_path,
        "--routing", "random", "--all-kernels", "--no-passes", "--heat", 0,
    )  # fmt: skip
    status, told = run_program(*common, "--tokens", "2")
    assert status == 0, told
    path = tmp_path / "products.json"
    first = json.loads(path.read_text())
    assert [(c["op"], c["tokens"]) for c in first["cases"]] == [("fwd1", 2), ("fwd2", 2)]
    assert "left out: dx1,dw1,dx2,dw2 with 2 tokens" in told
    status, told = run_program(*common, "--tokens", "2,64", "--ops", "fwd1,dx1,dx2,dw1,dw2", "--append", path)
    assert status == 0, told
    record = json.loads(path.read_text())
    assert record["cases"][:2] == first["cases"]
    assert [c["op"] for c in record["cases"][2:]] == ["fwd1", "dx1", "dw1", "dx2", "dw2"]
    for case in record["cases"]:
        assert {"dense", "torch", "ours"} < set(case["contenders"])
        assert all(c["correct"] and c["ms"] > 0 for c in case["contenders"].values()), case
    status, _ = run_program(*common, "--commit", "def", "--append", path)
    assert "measured with commit abc, this run has def" in status


def test_gradients_of_small_batches_that_are_asked_for_alone_are_measured(tmp_path: Path, run_program: Run) -> None:
    status, told = run_program(
        "--device", "cpu", "--models", "demo", "--rounds", 1, "--out", tmp_path, "--no-passes", "--no-peers",
        "--heat", 0, "--ops", "dw1", "--tokens", 16,
    )  # fmt: skip
    assert status == 0, told
    assert "left out" not in told
    record = json.loads((tmp_path / "products.json").read_text())
    assert [(c["op"], c["tokens"]) for c in record["cases"]] == [("dw1", 16)]


def test_time_limit_ends_the_run_and_keeps_the_record(tmp_path: Path, run_program: Run) -> None:
    status, told = run_program("--device", "cpu", "--models", "demo", "--no-passes", "--seconds", 0, "--out", tmp_path)
    assert status == 0, told
    assert "--append continues" in told
    assert json.loads((tmp_path / "products.json").read_text())["cases"] == []


def test_a_backend_is_one_of_this_build(capsys: pytest.CaptureFixture[str]):
    cli = importlib.import_module("moegemm.bench.cli")
    with pytest.raises(SystemExit):
        cli.read_options(["--backend", "sm70"], None)
    assert "argument --backend: 'sm70'; accepted are " in capsys.readouterr().err
    for backend in moegemm.info()["backends"]:
        if backend["name"].startswith("sm"):
            assert cli.read_options(["--backend", backend["name"]], None).backend == backend["name"]
