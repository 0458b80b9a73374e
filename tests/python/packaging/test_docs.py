"""README, CONTRIBUTING and docs: links lead somewhere, and the folder stays small."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md")
PAGES = [ROOT / name for name in NAMES]
PAGES += sorted(DOCS.rglob("*.md"))
FILES = sorted(path for path in DOCS.rglob("*") if path.is_file())
PICTURES = [path for path in FILES if path.suffix in {".png", ".svg", ".jpg", ".pdf"}]
MOST_BYTES = 700_000
LINK = re.compile(r"\]\(([^()\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def links_of(page: Path) -> list[str]:
    found = LINK.findall(without_code(page.read_text()))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path):
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT), f"{link}: leads out of the repository"
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors_of(target), f"{link}: no such heading"


def test_every_page_can_be_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            ahead += [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)]
    assert [name_of(page) for page in PAGES if page not in reached] == []


def test_the_folder_stays_small():
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES


def test_every_picture_is_kept_once_and_shown():
    assert len({path.with_suffix("") for path in PICTURES}) == len(PICTURES), "one format for each picture"
    shown = {(page.parent / link).resolve() for page in PAGES for link in links_of(page)}
    assert [name_of(path) for path in PICTURES if path not in shown] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_no_commits(page: Path):
    """A page says what is so now; which commit a record measured stands in its JSON."""
    text = page.read_text()
    mixed = re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b", text)
    assert mixed + re.findall(r"commit\s+`?([0-9a-f]{7,40})\b", text) == []


FOLDERS = (
    "benchmarks", "bindings", "cmake", "data", "docs", "examples", "include", "python", "requirements", "scripts",
    "src", "testing", "tests",
)  # fmt: skip
SOURCES = [path for name in ("benchmarks", "bindings", "cmake", "examples", "include", "python", "src", "testing")
           for path in sorted((ROOT / name).rglob("*"))
           if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".cmake", ".txt"}]  # fmt: skip
SUFFIXES = r"\.(?:cpp|cuh|cu|h|inc|py|md|json|cmake|txt|toml|yml)\b"
FROM_ROOT = re.compile(rf"(?<![\w/.:-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w{SUFFIXES}")
QUOTED = re.compile(rf"`((?:[\w.-]+/)+[\w.-]+{SUFFIXES}|(?:{'|'.join(FOLDERS)})/[\w./-]*)`")
TO_BE_CHOSEN = re.compile(r"smXY|/x\.")  # stands for the name of something new


def test_files_that_a_page_names_exist():
    """From the root, or the end of a path."""
    files = [f"/{name_of(path)}" for path in SOURCES + FILES]
    gone = [
        f"{name_of(page)}: {name}"
        for page in PAGES
        for name in FROM_ROOT.findall(page.read_text()) + QUOTED.findall(page.read_text())
        if page.name != "CHANGELOG.md"  # which names what is gone
        and not TO_BE_CHOSEN.search(name)
        and not (ROOT / name).exists()
        and not any(file.endswith(f"/{name}") for file in files)
    ]
    assert gone == []


def test_files_that_a_source_names_exist():
    named = [(path, name) for path in SOURCES for name in FROM_ROOT.findall(path.read_text())]
    assert len(named) > 20
    assert [f"{name_of(path)}: {name}" for path, name in named if not (ROOT / name).exists()] == []


# What adding something may touch besides tests. A new folder counts as one.
MOST_FILES = {
    "an activation": 6,
    "a number format": 14,
    "a weight format": 17,
    "a GPU generation": 6,
    "an operation": 7,
}


def files_of(checklist: str) -> list[str]:
    """The paths that a checklist names before the colons of its steps. A bare name is beside the last one."""
    files: list[str] = []
    for step in re.findall(r"^\d+\. (.*?)(?=^\d+\. |^\n|\Z)", checklist, re.MULTILINE | re.DOTALL):
        folder = Path()
        for name in re.findall(r"`([\w./-]+)`", step.split(": ")[0]):
            path = Path(name) if "/" in name or name[0].isupper() else folder / name
            files.append(path.as_posix() + ("/" if name.endswith("/") else ""))
            folder = path.parent
    return files


@pytest.mark.parametrize("what", MOST_FILES)
def test_a_checklist_names_every_file_and_few(what: str):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    checklist = text.split(f"## Add {what}\n")[1].split("\n## ")[0]
    files = files_of(checklist)
    (said,) = re.findall(r"\b(\d+|Five|Six|Seven) files(?: and (a) folder)?, and the tests", checklist)
    number = {"Five": 5, "Six": 6, "Seven": 7}.get(said[0]) or int(said[0])
    assert len(files) == len(set(files)) == number + len(said[1])
    assert len(files) <= MOST_FILES[what], files
    assert [file for file in files if not TO_BE_CHOSEN.search(file) and not (ROOT / file).exists()] == []


def test_every_extra_of_the_package_is_in_a_page():
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].partition("\n\n")[0]
    extras = {line.split(" = ")[0] for line in section.splitlines()} - {"test", "example"}  # for a checkout
    pages = "".join(page.read_text() for page in PAGES)
    assert extras
    assert [name for name in sorted(extras) if f"moegemm[{name}]" not in pages] == []
