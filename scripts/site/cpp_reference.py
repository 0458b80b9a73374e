"""The reference of the C++ API as one Markdown page: every declaration of the public headers with its comment.

    python scripts/site/cpp_reference.py > cpp.md

Reads the headers as the formatter leaves them: what belongs together stands together, blank lines are between it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEADERS = Path(__file__).resolve().parents[2] / "include" / "moegemm"
EXPORT = "MOEGEMM_API "
DECLARED = (
    re.compile(r"(?:struct|class|enum class|enum) (?:MOEGEMM_API )?(\w+)"),
    re.compile(r"using (\w+) ="),
    re.compile(r"([\w~]+|operator\S+)\("),
    re.compile(r"constexpr [\w:<> ]* (\w+)"),
)


class Chunk(NamedTuple):
    """Declarations under one comment."""

    comment: list[str]
    code: list[str]

    @property
    def names(self) -> list[str]:
        """What the code declares in the namespace, in order."""
        found = [name for line in _own_lines(self.code) if (name := _declared_in(line))]
        return list(dict.fromkeys(found))


class Header(NamedTuple):
    """One public header."""

    name: str
    comment: list[str]  # of the whole file
    chunks: list[Chunk]


def _own_lines(code: list[str]) -> Iterator[str]:
    """The lines that begin a declaration of the namespace, not those inside or of its continuation."""
    depth, open_statement = 0, False
    for line in code:
        text = line.split("//")[0]
        if depth == 0 and not open_statement and text.strip():
            yield text
        depth += sum(text.count(c) for c in "{(") - sum(text.count(c) for c in "})")
        open_statement = bool(text.strip()) and not text.rstrip().endswith((";", "{", "}", ">"))  # template <...>


def _declared_in(line: str) -> str | None:
    forward_declared = re.fullmatch(r"(?:struct|class) \w+;\s*", line)
    if forward_declared or line.startswith((" ", "}", "template", "#", "namespace")):
        return None
    return next((found[1] for pattern in DECLARED if (found := pattern.search(line))), None)


def _comment_text(lines: list[str]) -> list[str]:
    return [line.strip().removeprefix("///").removeprefix(" ") for line in lines]


def _public_part(code: list[str]) -> list[str]:
    """Without private members, and without the word that exports a symbol."""
    kept: list[str] = []
    hidden = shifted = False
    for line in code:
        hidden = (hidden or line.strip() == "private:") and line != "};"
        if hidden:
            continue
        if kept and not kept[-1].strip() and line == "};":
            kept.pop()
        shifted = (EXPORT in line and not line.startswith(("struct", "class"))) or (shifted and line.startswith(" "))
        moved = shifted and EXPORT not in line and line.startswith(" " * len(EXPORT))
        line = line[len(EXPORT) :] if moved else line.replace(EXPORT, "")
        kept.append(line.replace("///<", "//"))
    return kept


def _chunks(lines: list[str]) -> Iterator[Chunk]:
    comment: list[str] = []
    code: list[str] = []
    depth = 0
    for line in [*lines, ""]:
        begins = depth == 0 and code and (not line.strip() or line.startswith("///"))
        if begins:
            yield Chunk(_comment_text(comment), _public_part(code))
            comment, code = [], []
        if depth == 0 and line.startswith("///"):
            comment.append(line)
        elif line.strip() or depth > 0:
            code.append(line)
        depth += line.count("{") - line.count("}")


def read_header(path: Path) -> Header:
    """The documented part of a header: what stands in `namespace moegemm`."""
    before, opening, rest = path.read_text().partition("namespace moegemm {\n")
    inside = rest.split("\n}  // namespace moegemm")[0] if opening else ""
    about = [line for line in before.splitlines() if line.startswith("///")]
    return Header(path.name, _comment_text(about), [chunk for chunk in _chunks(inside.splitlines()) if chunk.names])


def _escaped(line: str) -> str:
    """`a < b` in a sentence is no HTML; between backticks it needs no help."""
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(line.split("`")))


def _prose(lines: list[str]) -> list[str]:
    """A comment as Markdown: what is indented in it is a table of arguments or a formula, and stays as it is."""
    text: list[str] = []
    fenced = False
    for line in lines:
        indented = line.startswith("  ") and bool(line.strip())
        if indented != fenced:
            text += ["```text"] if indented else ["```", ""]
            if indented:
                text.insert(-1, "")
            fenced = indented
        text.append(line if indented else _escaped(line))
    return [*text, "```"] if fenced else text


def to_markdown(folder: Path = HEADERS) -> str:
    """One section for each header that declares something, one heading for each group of declarations."""
    headers = [header for path in sorted(folder.glob("*.h")) if (header := read_header(path)).chunks]
    lines = ["# C++ API", "", "`#include <moegemm/moegemm.h>` brings all of it; everything is in `namespace moegemm`."]
    for header in headers:
        lines += ["", f"## {header.name}", "", *_prose(header.comment)]
        for chunk in header.chunks:
            title = ", ".join(f"`{name}`" for name in chunk.names)
            lines += ["", f"### {title}", "", *_prose(chunk.comment), "", "```cpp", *chunk.code, "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(to_markdown(), end="")
