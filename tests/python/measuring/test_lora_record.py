"""moegemm-bench --lora: what it measures is what it says."""

import contextlib
import json
from importlib import import_module

import pytest
import torch
from counted import Counted

pytest.importorskip("transformers")
pytest.importorskip("peft")
lora = import_module("moegemm.bench.kinds.lora")
from moegemm.bench import cli  # noqa: E402
from moegemm.bench.cases import Model  # noqa: E402
from moegemm.bench.timing import Clock  # noqa: E402

TINY = Model("tiny", 4, 2, 32, 24)


@pytest.fixture(scope="module")
def entries() -> list[dict]:
    found: list[dict] = []
    lora.measure([TINY], [128, 8], "cpu", torch.bfloat16, 2, Clock("cpu"), set(), found.append)
    return found


def test_every_contender_is_timed(entries):
    assert [(e["tokens"], e["what"]) for e in entries] == [(128, "forward + backward"), (8, "forward")]
    names = {"frozen", "ours 16", "peft 16", "ours 64", "peft 64"}
    assert [set(e["contenders"]) for e in entries] == [names, names | {"kept 16", "kept 64"}]
    assert all(c["ms"] > 0 for e in entries for c in e["contenders"].values())


def test_ours_is_not_the_path_of_peft(entries):
    """It rounds elsewhere, and keeps no adapted weights."""
    assert all(0 < d < 0.02 for e in entries for d in e["difference"].values())
    kept = {name: c["kept_mib"] for name, c in entries[0]["contenders"].items()}
    assert kept["frozen"] < kept["ours 16"] < kept["peft 16"]
    weights = 2 * 4 * 3 * 24 * 32 / 2**20
    assert kept["peft 16"] >= kept["frozen"] + weights


def test_what_is_done_is_not_measured_again():
    found: list[dict] = []
    done = {("tiny", 128), ("tiny", 8)}
    lora.measure([TINY], [128, 8], "cpu", torch.bfloat16, 2, Clock("cpu"), done, found.append)
    assert found == []


def test_only_kept_calls_keep_factors():
    with contextlib.closing(
        lora.Layer(TINY, 8, torch.bfloat16, "cpu", lora.SizedExperts(TINY, torch.bfloat16, "cpu"))
    ) as layer:
        for name in ("ours 16", "kept 16", "ours 16"):
            layer.forward(name)()
        for name, copies in (("ours 16", 1), ("kept 16", 0)):
            with Counted() as ran:
                layer.forward(name)()
            assert ran.counts["joined_factors"] == copies


def test_a_record_renders_as_a_table_for_training_and_one_for_inference(entries, tmp_path):
    run = {"gpu": "a CPU", "dtype": "bf16", "torch": "2", "commit": "abc", "date": "2026-01-01", "rounds": 2}
    record = {"format": 1, "kind": "lora", "run": run, "models": {}, "cases": entries}
    source = tmp_path / "lora.json"
    source.write_text(json.dumps(record))
    assert cli.main(["--render", str(source), "--out", str(tmp_path), "--stem", "page"]) == 0
    lines = (tmp_path / "page.md").read_text().splitlines()
    table = [line for line in lines if line.startswith("| tiny")]
    assert len(table) == 2
    assert [line.count("|") for line in table] == [7, 9]
    assert "x) / " in table[0]
    assert "(inference)" in table[1]
