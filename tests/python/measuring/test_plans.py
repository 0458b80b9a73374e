"""moegemm.plan, and what plans and reports look like in a notebook."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import moegemm
import pytest
import torch

SIZES = {"experts": 8, "topk": 2, "hidden": 64, "intermediate": 32, "tokens": 16}
FLAGS = [f"--{name}={value}" for name, value in SIZES.items()]


def program(*arguments: str) -> str:
    package = Path(moegemm.__file__).parents[1]
    command = [sys.executable, "-c", "from moegemm.program import main; main()", *arguments]
    environment = os.environ | {"PYTHONPATH": str(package)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_plan_prints_as_the_program_does():
    assert f"{moegemm.plan(**SIZES)}\n\n" == program("plan", *FLAGS)


def test_a_plan_has_the_numbers_of_the_program():
    found = moegemm.plan(**SIZES, dtype=torch.float32)
    printed = json.loads(program("plan", *FLAGS, "--dtype=fp32", "--json"))
    assert found.layer == printed["layer"]
    assert found.plans == printed["plans"]


def test_a_plan_in_a_notebook_is_a_picture_and_a_table(tmp_path: Path):
    found = moegemm.plan("olmoe", tokens=64)
    page = ElementTree.fromstring(f"<body>{found._repr_html_()}</body>")
    assert page[0].tag.endswith("svg")
    rows = page.findall("table/tbody/tr")
    assert [row[0].text for row in rows] == [p["op"] for p in found.plans]
    found.plot(tmp_path / "plan.svg")
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().get("width") == "900"
    with pytest.raises(
        ValueError, match=r"plan\.png'; the picture is an SVG, and a name that ends in \.svg is accepted"
    ):
        found.plot(tmp_path / "plan.png")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "gpt-2"}, ValueError, "model: no model is called gpt-2; accepted: demo, "),
        ({"tokens": -3}, ValueError, "tokens: got -3; accepted: a whole number from 0 to "),
        ({"dtype": "fp8"}, ValueError, "dtype: fp8 not in {bf16,fp16,fp32}"),
        ({"experts": 2, "topk": 3}, ValueError, "topk: 3 experts per token, but there are 2; accepted: 1 to 2"),
        ({"model": "--help"}, ValueError, "model is '--help'; a name of the catalogue is accepted"),
    ],
)
def test_what_the_program_refuses_is_raised(arguments, error, message):
    with pytest.raises(error) as raised:
        moegemm.plan(**arguments)
    assert str(raised.value).startswith(message)


def test_a_library_without_the_program_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = tmp_path / "libempty.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "/dev/null"], check=True)
    monkeypatch.setattr("moegemm.program.found_library", lambda: library)
    with pytest.raises(NotImplementedError, match=r"libempty\.so was built without the program: "):
        moegemm.plan()


def test_reports_of_tuning_print_as_a_table_and_stay_a_list():
    reports = moegemm.tune(torch.randn(60, 16), torch.randn(4, 8, 16), torch.tensor([30, 0, 10, 20]), 1, budget=0.1)
    assert isinstance(reports, list)
    assert json.loads(json.dumps(reports)) == reports
    lines = repr(reports).splitlines()
    assert lines[0].split() == ["problem", "fastest", "us", "status"]
    assert [line.split()[0] for line in lines[2:]] == ["forward", "dX", "dW"]
    page = ElementTree.fromstring(reports._repr_html_())
    assert [row[1].text for row in page.findall("tbody/tr")] == [report["kernel"] for report in reports]


def test_the_report_of_a_model_is_a_table_in_a_notebook():
    pytest.importorskip("transformers")
    from tiny_models import build

    report = moegemm.report(build("mixtral", "eager"))
    page = ElementTree.fromstring(report._repr_html_())
    rows = [[cell.text or "" for cell in row] for row in page.findall("tbody/tr")]
    assert [row[0] for row in rows] == [layer.name for layer in report.layers]
    assert all(row[2] == "own code" and "experts implementation" in row[3] for row in rows)


def test_a_plan_of_quantised_weights_is_that_of_the_program():
    found = moegemm.plan(**SIZES, weights="mxfp4")
    printed = json.loads(program("plan", *FLAGS, "--weights=mxfp4", "--json"))
    assert found.plans == printed["plans"]
    assert found.plans != moegemm.plan(**SIZES).plans
