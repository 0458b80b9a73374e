"""moegemm-bench --quantised: what it measures is what it says."""

import json

import moegemm
import pytest
import torch
from moegemm.bench import cli, quantised
from moegemm.bench.cases import Model
from moegemm.bench.timing import Clock

TINY = Model("tiny", 4, 2, 128, 64)
WORDS = ("mxfp4", "fp8/128x128", "fp8/channel", "int4/32", "nf4/64")


@pytest.fixture(scope="module")
def entries() -> list[dict]:
    found: list[dict] = []
    quantised.measure([TINY], [128, 8], WORDS, quantised.OPS, "cpu", 2, Clock("cpu"), set(), found.append)
    return found


def test_every_product_and_contender_is_timed(entries):
    cases = {(e["op"], e["tokens"]) for e in entries}
    assert cases == {(op, 128) for op in quantised.OPS} | {("fwd1", 8), ("fwd2", 8)}  # no gradients of few tokens
    names = {"bf16", *WORDS, *(f"{word} + dequantise" for word in WORDS)}
    assert all(set(e["contenders"]) == names for e in entries)
    assert all(c["ms"] > 0 for e in entries for c in e["contenders"].values())
    assert all(all(e["same_bits"].values()) and len(e["same_bits"]) == 5 for e in entries)


def test_random_weights_are_finite_and_of_their_format():
    for word in WORDS:
        w = quantised.random_weight(word, 2, 160, 128, "cpu")
        assert isinstance(w, moegemm.QuantizedWeight)
        assert w.word == word
        assert tuple(w.shape) == (2, 160, 128)
        assert torch.isfinite(w.dequantize().float()).all()


def test_what_is_done_is_not_measured_again():
    found: list[dict] = []
    done = {("tiny", 8, "fwd1")}
    quantised.measure([TINY], [8], WORDS[:1], ["fwd1"], "cpu", 2, Clock("cpu"), done, found.append)
    assert found == []


def test_a_record_renders_as_one_table(entries, tmp_path):
    run = {"gpu": "a CPU", "dtype": "bf16", "torch": "2", "commit": "abc", "date": "2026-01-01", "rounds": 2}
    record = {"format": 1, "kind": "quantised", "run": run, "models": {}, "cases": entries}
    source = tmp_path / "quantised.json"
    source.write_text(json.dumps(record))
    assert cli.main(["--render", str(source), "--out", str(tmp_path), "--stem", "page"]) == 0
    page = (tmp_path / "page.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| tiny")]
    assert len(table) == 6
    assert all(line.count("|") == 8 and "x, " in line for line in table)
    assert "Every result has the bits of dequantising first." in page
