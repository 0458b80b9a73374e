"""The oldest transformers that is supported is the same wherever it is stated, and an older one is refused."""

import re
from importlib import import_module
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
registration = import_module("moegemm.integrations.registration")

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.6.2"])
def test_an_older_transformers_is_refused_with_the_minimum(version):
    with pytest.raises(ImportError, match=rf"needs transformers 5.7 or newer.*{re.escape(version)}"):
        registration.require_supported(version)


@pytest.mark.parametrize("version", ["5.7.0", "5.8.0.dev0", "6.0.0rc1"])
def test_a_newer_transformers_is_accepted(version):
    registration.require_supported(version)


def test_registering_asks_for_the_version(monkeypatch):
    asked = []
    monkeypatch.setattr(registration, "require_supported", asked.append)
    registration.register()
    assert asked == [transformers.__version__]


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("pyproject.toml", r"transformers>=(\d+)\.(\d+)"),
        ("requirements/demo-gpu.txt", r"transformers>=(\d+)\.(\d+)"),
        ("docs/how-to/transformers.md", r"transformers (\d+)\.(\d+) is the oldest"),
        ("CONTRIBUTING.md", r"the oldest transformers \((\d+)\.(\d+)\)"),
    ],
)
def test_every_statement_of_the_minimum_is_the_same(file, pattern):
    stated = re.findall(pattern, (ROOT / file).read_text())
    assert stated
    assert {tuple(map(int, pair)) for pair in stated} == {registration.MINIMUM}
