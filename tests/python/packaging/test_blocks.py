"""Every Python and shell block of README, documents and docstrings runs as it is printed.

A comment right above a block of a page says what the page does not show:

    <!-- given
    Python that makes what the block uses
    -->
    <!-- needs: a GPU -->            it runs where there is one
    <!-- needs: CUDA kernels -->     it runs where they are compiled in
    <!-- not run: why -->            it runs nowhere

Python blocks of a page run one after another in one namespace, as a reader types them. In shell blocks the program's
layers are of toy size, except in arithmetic on many ranks: of a flag given twice the last one counts.
"""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import moegemm
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(
    r"(?P<marks>(?:^<!--(?:(?!-->).)*?-->\n)*)^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
MARK = re.compile(r"<!-- ?(given|needs|not run)(?::|\n)(.*?)-->", re.DOTALL)
LANGUAGES = {"", "python", "sh", "text", "cpp", "cmake", "json"}
SMALL = "--experts 8 --topk 2 --hidden 64 --intermediate 32 --tokens 16"


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    code: str
    given: str
    needs: str
    not_run: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        marks = {kind: words.strip() for kind, words in MARK.findall(match["marks"])}
        line = text.count("\n", 0, match.start("code")) + 1
        told = (marks.get("given", ""), marks.get("needs", ""), marks.get("not run", ""))
        found.append(Block(page, line, match["language"], match["code"], *told))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON_PAGES = sorted({block.page for block in BLOCKS if block.language == "python"})
SHELL_BLOCKS = [block for block in BLOCKS if block.language == "sh"]


def skip_reason(block: Block) -> str:
    """Why this machine cannot run a block; empty: it can."""
    if block.not_run:
        return block.not_run
    if block.needs == "a GPU" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if block.needs == "CUDA kernels" and not any(k["backend"] == "sm80" for k in moegemm.info()["kernels"]):
        return "no CUDA kernels are compiled in"
    return ""


def test_every_block_is_found_and_its_marks_mean_something():
    for page in PAGES:
        text = page.read_text()
        assert text.count("\n```") == 2 * len(blocks_of(page)), f"{page}: a block that was not found"
        kinds = re.findall(r"^<!-- ?([a-z ]+)", text, re.MULTILINE)
        assert set(kinds) <= {"given", "needs", "not run"}, f"{page}: {kinds}"
        assert len(kinds) == sum(bool(b.given) + bool(b.needs) + bool(b.not_run) for b in blocks_of(page)), page
    assert {block.language for block in BLOCKS} <= LANGUAGES
    assert {block.needs for block in BLOCKS} <= {"", "a GPU", "CUDA kernels"}


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks_of(page):
        if block.language != "python" or skip_reason(block):
            continue
        if "transformers" in block.given + block.code:
            pytest.importorskip("transformers")
        if "import peft" in block.code:
            pytest.importorskip("peft")
        exec(compile(block.given, f"given {block.name}", "exec"), names)
        exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
        ran += 1
    if ran == 0:
        pytest.skip("; ".join(skip_reason(b) for b in blocks_of(page) if b.language == "python"))


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.name)
def test_shell_block_runs(block: Block, tmp_path: Path):
    if reason := skip_reason(block):
        pytest.skip(reason)
    programs = tmp_path / "bin"
    programs.mkdir()
    built = ROOT / "build" / "release" / "src" / "cli" / "moegemm"  # the same program, without the time to import torch
    program = f'exec "{built}"' if built.is_file() else f'exec "{sys.executable}" -m moegemm'
    small = f'case "$*" in *--expert-parallel*) ;; plan*|run*|tune*) set -- "$@" {SMALL};; esac\n{program} "$@"'
    (programs / "moegemm").write_text(f"#!/bin/sh\n{small}\n")
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in programs.iterdir():
        path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
        "MOEGEMM_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def modules() -> list[str]:
    found = pkgutil.walk_packages(moegemm.__path__, "moegemm.")
    return ["moegemm", *(module.name for module in found if not module.name.endswith("__main__"))]


@pytest.mark.parametrize("name", modules())
def test_docstrings_of_a_module_run(name: str):
    if name == "moegemm.transformers" or ".integrations" in name:
        pytest.importorskip("transformers")
    engine = name.rpartition(".")[2]
    if engine in ("torchtitan", "megatron"):
        pytest.importorskip(name, reason=f"{engine} is not installed", exc_type=ImportError)
    module = importlib.import_module(name)
    assert "+SKIP" not in Path(str(module.__file__)).read_text(), "say it in words, where it cannot run"
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def raised_by_bad_arguments() -> str:
    """What calls with bad arguments say: those messages are put together, and stand nowhere as a whole."""
    X, W, sizes = torch.randn(6, 16), torch.randn(4, 8, 16), torch.tensor([3, 0, 1, 2])
    gather = torch.arange(12)
    calls: list[dict[str, Any]] = [
        {"permute_x": True},
        {"permute_x": True, "permute_y": True, "gather_indices": gather},
        {"W": W.bfloat16()},
        {"W": W.to(torch.float8_e4m3fn)},
        {"m_sizes": 9 * sizes, "check": True},
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, TypeError)) as raised:
            moegemm.grouped_gemm(**({"X": X, "W": W, "m_sizes": sizes, "topk": 1} | call))
        messages.append(str(raised.value))
    return "\n".join(messages)


def test_messages_on_the_page_of_errors_are_those_of_the_library():
    """The first column of its tables; `...` stands for a value."""
    folders, kinds = ("python", "src", "bindings", "scripts", "cmake"), {".py", ".cpp", ".h", ".cmake", ""}
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in kinds]
    sources = "\n".join(path.read_text() for path in files if path.is_file())
    joined = re.sub(r'"\s*(?:\+\s*)?\n\s*f?"', "", sources).replace('\\"', '"')  # strings that go on in the next line
    raised = raised_by_bad_arguments()
    messages = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(messages) > 20
    for message in messages:
        parts = message.split("...")
        said = re.search(".*".join(map(re.escape, parts)), raised) or all(part.strip() in joined for part in parts)
        assert said, f"{message}: nobody says so"
