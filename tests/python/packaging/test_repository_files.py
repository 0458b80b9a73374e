"""What hosts and tools read of the repository: workflows, templates, citation, pre-commit."""

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def jobs() -> list[Any]:
    return [job for path in WORKFLOWS for job in read(path)["jobs"].values()]


def commands() -> list[str]:
    """Everything that the workflows run."""
    return [step["run"] for job in jobs() for step in job["steps"] if "run" in step]


def test_workflows_build_test_lint_document_and_package_with_make():
    called = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert {"build", "test", "lint", "docs", "wheel"} <= called
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called - targets == set()


def test_workflows_do_nothing_else_but_prepare():
    for line in commands():
        assert line.startswith(("make ", "apt-get update")), f"{line}: a make command that a developer has too"


def test_git_may_read_the_workspace_in_every_container():
    prepared = [job["steps"][0]["run"] for job in jobs() if "container" in job]
    assert len(prepared) == 3
    for line in prepared:
        assert 'git config --global --add safe.directory "$GITHUB_WORKSPACE"' in line


def test_packages_of_a_release_are_made_with_kernels():
    made = [line for line in commands() if line.startswith("make package")]
    assert made == ["make package CUDA=ON"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_ask_for_the_output_of_info(path: Path):
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    labels = [part["attributes"]["label"] for part in form["body"]]
    assert any("`moegemm info`" in label for label in labels)
    assert len({part["id"] for part in form["body"]}) == len(form["body"])


def test_pull_requests_ask_for_the_output_of_info():
    assert "`moegemm info`" in (ROOT / ".github" / "pull_request_template.md").read_text()


def test_pre_commit_has_the_formatters_of_lint():
    hooks = [hook for repository in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    installed = {package for hook in hooks for package in hook["additional_dependencies"]}
    listed = (ROOT / "requirements" / "lint.txt").read_text().splitlines()
    assert installed == {line for line in listed if line and not line.startswith("#")}
    lint = (ROOT / "scripts" / "lint").read_text()
    for hook in hooks:
        tool = hook["entry"].removesuffix(" -i").removesuffix(" --fix")
        assert f"/{tool} " in lint, f"{hook['id']}: make lint does not run it"


def test_citation_names_this_version_and_its_licence():
    citation, package = read(ROOT / "CITATION.cff"), (ROOT / "pyproject.toml").read_text()
    assert citation["version"] == re.search(r'^version = "(.*)"$', package, re.MULTILINE)[1]
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "moegemm contributors"}]


def test_no_test_is_skipped_where_a_module_of_ours_does_not_import():
    tests = ROOT / "tests" / "python"
    skipping = re.compile(r'importorskip\(\s*"moegemm')
    assert [path.name for path in tests.rglob("*.py") if skipping.search(path.read_text())] == []
