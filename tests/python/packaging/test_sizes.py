"""Files and functions stay short enough to be read at once."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CODE = ("include", "src", "bindings", "python")
MOST_FUNCTION_LINES = 80
MOST_FILE_LINES = 500
MOST_FILES = 15

# The first line of what is not a function although it opens a brace.
_NO_FUNCTION = re.compile(
    r"\s*(namespace|class|struct|enum|union|extern|template <.*> (class|struct)|requires|if|for|while)\b"
)


def sources(*suffixes: str) -> Iterator[tuple[str, list[str]]]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *CODE], capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in suffixes and path.is_file():
            yield name, path.read_text().splitlines()


def python_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """A description does not count: users read it elsewhere."""
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            described = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            description = described.end_lineno - described.lineno + 1 if described else 0
            yield node.name, node.end_lineno - node.lineno + 1 - description


def cpp_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """Functions outside of functions. clang-format ends each with a brace below the first column of its beginning."""
    begin = 0
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.rstrip().endswith("{") and "(" in "".join(lines[begin : at + 1]):
            indent = len(lines[begin]) - len(lines[begin].lstrip())
            end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith(" " * indent + "}")), at)
            if not _NO_FUNCTION.match(lines[begin]):
                yield lines[begin].strip(), end - begin + 1
                at = end
        if re.search(r"[;{}:>]\s*(//.*)?$", line) or not line.strip() or line.lstrip().startswith(("//", "#")):
            begin = at + 1
        at += 1


def test_functions_fit_on_a_page():
    found = [(name, functions) for name, lines in sources(".py") for functions in python_functions(lines)]
    found += [
        (name, functions) for name, lines in sources(".h", ".cpp", ".cu", ".cuh") for functions in cpp_functions(lines)
    ]
    assert len(found) > 1500, "the functions are not recognised"
    long = [f"{name}: {what}: {lines} lines" for name, (what, lines) in found if lines > MOST_FUNCTION_LINES]
    assert not long, "\n".join(long)


def test_files_have_one_subject():
    long = [
        f"{name}: {len(lines)} lines"
        for name, lines in sources(".py", ".h", ".cpp", ".cu", ".cuh")
        if len(lines) > MOST_FILE_LINES
    ]
    assert not long, "\n".join(long)


def test_folders_are_taken_in_at_a_glance():
    command = ["git", "-C", str(ROOT), "ls-files", *CODE, "tests", "testing", "scripts", "benchmarks", "docs"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    counts = Counter(str(Path(name).parent) for name in listed)
    large = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert not large


def test_lines_of_functions_are_counted():
    lines = ["template <class T>", "int twice(int a,", "          int b) {", "  if (a) {", "  }", "}", "struct S {"]
    lines += ["  void run() {", "    call([&] {", "    });", "  }", "};"]
    assert [count for _, count in cpp_functions(lines)] == [5, 4]
    assert list(python_functions(["def f():", '    """One', "", '    more."""', "    return 1"])) == [("f", 2)]
