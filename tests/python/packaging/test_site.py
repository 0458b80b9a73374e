"""The site that `make docs` builds: its references leave nothing out, and where MkDocs is installed it builds."""

import re
import subprocess
from pathlib import Path
from types import ModuleType

import moegemm
import moegemm.distributed
import pytest
from moegemm.bench.notebook import read_record
from moegemm.integrations.reporting import Report
from moegemm.program.plans import LayerPlan
from moegemm.tuning.reports import TuneReports
from programs import load_program

ROOT = Path(__file__).resolve().parents[3]
HEADERS = sorted((ROOT / "include" / "moegemm").glob("*.h"))


def part_of_the_site(name: str) -> ModuleType:
    return load_program(f"scripts/site/{name}.py")


def test_python_reference_has_every_public_name_once():
    sections = part_of_the_site("python_reference").SECTIONS
    listed = [name for names in sections.values() for name in names]
    of_ranks = [f"distributed.{name}" for name in moegemm.distributed.__all__]
    results = {"integrations.reporting.Report", "program.plans.LayerPlan", "tuning.reports.TuneReports"}
    assert sorted(listed) == sorted([*moegemm.__all__, *of_ranks, *results, "bench.notebook.read_record"])
    assert sorted(results) == sorted(
        f"{kind.__module__}.{kind.__name__}".removeprefix("moegemm.") for kind in (LayerPlan, Report, TuneReports)
    )
    assert callable(read_record)


def test_cpp_reference_has_every_public_declaration():
    page = part_of_the_site("cpp_reference").to_markdown()
    headings = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^### .*$", page, re.MULTILINE))))
    text = "\n".join(path.read_text() for path in HEADERS)
    types = re.findall(r"^(?:struct|class|enum class) (?:MOEGEMM_API )?(\w+)[^;\n]*\{", text, re.MULTILINE)
    functions = re.findall(r"^MOEGEMM_API [\w:<>&* ]*?(\w+)\(", text, re.MULTILINE)
    assert len(types) > 20
    assert len(functions) > 20
    assert set(types + functions) - {"std"} <= headings  # std::hash<Plan>


def test_cpp_reference_keeps_comments_and_leaves_private_members_out():
    page = part_of_the_site("cpp_reference").to_markdown()
    assert "rows of each expert" in page  # beside a member
    assert "Sorts the M = T * topk routed rows by expert" in page  # above a function
    assert "MOEGEMM_API" not in page
    assert "private:" not in page
    assert not re.search(r"^  \S+ \w+_;", page, re.MULTILINE)


def test_every_page_of_the_menu_exists_once():
    yaml = pytest.importorskip("yaml")
    menu: list[str] = []

    def collect(entry: object) -> None:
        for part in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ():
            collect(part)
        if isinstance(entry, str):
            menu.append(entry)

    collect(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = re.findall(r'": "([\w/-]+\.md)"', (ROOT / "scripts" / "site" / "hooks.py").read_text())
    assert "examples/train_moe.md" in made
    pages |= set(made)
    assert len(menu) == len(set(menu))
    assert pages <= set(menu)


def test_the_site_builds_without_a_warning(tmp_path: Path):
    mkdocs = ROOT / "build" / "docs-venv" / "bin" / "mkdocs"
    if not mkdocs.is_file():
        pytest.skip("make docs, which builds the site and installs what it needs, has not run here")
    command = [mkdocs, "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "python.html").read_text().count("doc-heading") >= len(moegemm.__all__)
