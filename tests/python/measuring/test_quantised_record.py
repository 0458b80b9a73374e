"""moegemm-bench --quantised: what it measures is what it says."""

import json

import moegemm
import pytest
import torch
from moegemm.bench import cli
from moegemm.bench.cases import Model
from moegemm.bench.kinds import quantised
from moegemm.bench.timing import Clock

TINY = Model("tiny", 4, 2, 128, 64)
WORDS = ("mxfp4", "fp8/128x128", "fp8/channel", "int4/32", "nf4/64")


@pytest.fixture(scope="module")
def entries() -> list[dict]:
    found: list[dict] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "MANY_TOKENS", 128)
        cases = quantised.cases_of([TINY], [128, 8], quantised.OPS)
    quantised.measure(cases, WORDS, "cpu", 2, Clock("cpu"), found.append)
    return found


def test_every_product_and_contender_is_timed(entries):
    cases = {(e["op"], e["tokens"]) for e in entries}
    few, in_order = {("fwd1", 8), ("fwd2", 8)}, {("fwd1 in order", 128), ("dx1 in order", 128)}
    assert cases == {(op, 128) for op in quantised.OPS} | few | in_order  # no gradients of few tokens
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


def test_what_is_done_is_not_measured_again(entries, tmp_path):
    options = ["--quantised", "--device", "cpu", "--models", "demo", "--tokens", "8,2", "--formats", "mxfp4"]
    options += ["--ops", "fwd2", "--rounds", "1", "--commit", "abc", "--out", str(tmp_path), "--stem", "page"]
    assert cli.main(options) == 0
    first = json.loads((tmp_path / "page.json").read_text())["cases"]
    assert [(case["op"], case["tokens"]) for case in first] == [("fwd2", 8), ("fwd2", 2)]
    assert cli.main([*options, "--append", str(tmp_path / "page.json"), "--ops", "fwd1,fwd2"]) == 0
    cases = json.loads((tmp_path / "page.json").read_text())["cases"]
    assert cases[:2] == first
    assert [(case["op"], case["tokens"]) for case in cases[2:]] == [("fwd1", 8), ("fwd1", 2)]


def test_only_models_of_moderate_size_are_measured_with_few_tokens_unless_these_are_named():
    large = Model("deepseek-v3", 256, 8, 7168, 2048)
    small = Model("qwen3-30b-a3b", 128, 8, 2048, 768)
    ops = ["fwd1", "dx1"]
    assert [case[1:] for case in quantised.cases_of([large], None, ops)] == [
        (8192, "fwd1"), (8192, "fwd1 in order"), (8192, "dx1"), (8192, "dx1 in order"),
    ]  # fmt: skip
    assert {tokens for _, tokens, _ in quantised.cases_of([small], None, ops)} == set(quantised.TOKENS)
    assert quantised.cases_of([large], [1], ops) == [(large, 1, "fwd1")]


def test_a_record_renders_as_one_table(entries, tmp_path):
    run = {"gpu": "a CPU", "dtype": "bf16", "torch": "2", "commit": "abc", "date": "2026-01-01", "rounds": 2}
    record = {"format": 1, "kind": "quantised", "run": run, "models": {}, "cases": entries}
    source = tmp_path / "quantised.json"
    source.write_text(json.dumps(record))
    assert cli.main(["--render", str(source), "--out", str(tmp_path), "--stem", "page"]) == 0
    page = (tmp_path / "page.md").read_text()
    table = [line for line in page.splitlines() if line.startswith("| tiny")]
    assert len(table) == 8
    assert all(line.count("|") == 8 and "x, " in line for line in table)
    assert "Every result has the bits of dequantising first." in page
