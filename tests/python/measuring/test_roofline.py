"""The roofline of a record, and the record in a notebook."""

import json
import re
from pathlib import Path

import moegemm
import pytest
from moegemm.bench.cases import Model, read_catalogue
from moegemm.bench.notebook import read_record
from moegemm.bench.pages import roofline
from moegemm.bench.record import load_record

RECORDS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"
RECORD = RECORDS / "hopper" / "hopper.json"


@pytest.mark.parametrize("op", ["fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2"])
def test_traffic_is_that_of_the_planner(op: str):
    """With so many rows that every expert has some, the planner expects what a record counts."""
    model = read_catalogue()["olmoe"]
    tokens, rows = 4096, 4096 * model.topk
    _, n, k = model.weight_shape(op)
    case = {"op": op, "tokens": tokens, "rows": rows, "touched_experts": model.experts, "flops": 2.0 * rows * n * k}
    name = {"fwd": "forward", "dx": "dX", "dw": "dW"}[op[:-1]] + f" {op[-1]}"
    planned = next(p for p in moegemm.plan("olmoe", tokens=tokens).plans if p["op"] == name)
    assert planned["cost"]["flops"] == case["flops"]
    assert roofline.traffic_bytes(case, model, 2) == pytest.approx(planned["cost"]["bytes"], rel=1e-6)


def test_intensity_of_one_row_per_expert_is_one_operation_per_byte():
    """2 FLOP for each weight of 2 bytes; rows weigh little beside weights of these sizes."""
    model = Model("wide", 8, 1, 16384, 16384)
    case = {"op": "fwd2", "tokens": 8, "rows": 8, "touched_experts": 8, "flops": 2.0 * 8 * 16384 * 16384}
    assert roofline.intensity(case, model, 2) == pytest.approx(1.0, rel=1e-3)


def test_no_product_of_the_record_is_far_above_the_roof():
    """A copy is what the roof is measured with; reads alone are a little faster."""
    record = load_record(RECORD)
    bandwidth = record["run"]["memory_bytes_per_s"]
    for case in record["cases"]:
        model = Model(**record["models"][case["model"]])
        seconds = roofline.traffic_bytes(case, model, 2) / bandwidth
        assert case["contenders"]["ours"]["ms"] * 1e-3 > 0.9 * seconds, case


def test_a_record_in_a_notebook_is_its_page_with_the_pictures_inside():
    pytest.importorskip("matplotlib")
    record = read_record(RECORD)
    assert repr(record).startswith("NVIDIA H200, bf16, ")
    page = record._repr_markdown_()
    assert page.startswith("# ")
    assert page.count("](data:image/png;base64,") == 4
    assert "](hopper" not in page


@pytest.mark.parametrize("path", sorted(RECORDS.rglob("*.json")), ids=lambda path: path.stem)
def test_every_record_is_shown_or_refused_in_a_sentence(path: Path):
    if "format" not in json.loads(path.read_text()):  # of a program in benchmarks/, which has a form of its own
        with pytest.raises(ValueError, match=rf"{path.name} is no record of moegemm-bench; JSON files that it wrote"):
            read_record(path)
        return
    record = read_record(path)
    if record.kind == "lora":
        pytest.importorskip("transformers")
    assert re.match(r"NVIDIA H200, \w+, 2026-\d\d-\d\d: \d+ cases", repr(record))
    assert record._repr_markdown_().startswith("# ")


def test_a_file_that_is_no_record_is_refused(tmp_path: Path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no record of moegemm-bench"):
        read_record(tmp_path / "other.json")
