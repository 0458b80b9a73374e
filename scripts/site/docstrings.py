"""Docstrings as Markdown: sessions of the interpreter and indented lists become blocks of code, on the page too."""

from itertools import groupby
from typing import Any

import griffe


def kind_of(line: str, before: str) -> str:
    """What kind of block a line belongs to, after a line of the kind `before`; empty: prose."""
    if line.startswith((">>> ", "... ")):
        return "pycon"
    if not line.strip():
        return ""
    return before if before == "pycon" else "text" if line.startswith("    ") else ""


def to_markdown(text: str) -> str:
    kinds: list[str] = []
    for line in text.split("\n"):
        kinds.append(kind_of(line, kinds[-1] if kinds else ""))
    lines: list[str] = []
    for kind, group in groupby(zip(kinds, text.split("\n"), strict=True), key=lambda pair: pair[0]):
        block = [line for _, line in group]
        lines += ["", f"```{kind}", *(line.removeprefix("    ") for line in block), "```", ""] if kind else block
    return "\n".join(lines)


class DocstringsAsMarkdown(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
