"""Tables of what the package reports: as text, and as HTML for notebooks."""

from collections.abc import Collection, Iterable, Sequence
from html import escape

_CELL = "padding:2px 10px;vertical-align:top;text-align:"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Cells padded to the width of their column; the columns of `right` hold numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join(line(cells) for cells in (head, ["-" * width for width in widths], *rows))


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """The same as HTML."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ["right" if i in right else "left" for i in range(len(cells))]
        parts = (f'<{tag} style="{_CELL}{s}">{escape(c)}</{tag}>' for s, c in zip(sides, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table>\n<thead>{line('th', head)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
