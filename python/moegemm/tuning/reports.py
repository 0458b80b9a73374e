"""What tuning found: a list of dicts that prints as a table."""

from typing import Any

from moegemm.program.tables import html_table, text_table

_HEAD = ("problem", "fastest", "us", "status")


class TuneReports(list[dict[str, Any]]):
    """One report per product, as moegemm.tune describes them."""

    def _rows(self) -> list[tuple[str, ...]]:
        return [(report["problem"], report["kernel"], _microseconds(report), _status(report)) for report in self]

    def __repr__(self) -> str:
        return text_table(_HEAD, self._rows(), right=(2,))

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._rows(), right=(2,))


def _microseconds(report: dict[str, Any]) -> str:
    times = [c["us"] for c in report["candidates"] if c["kernel"] == report["kernel"] and c["us"] > 0]
    return f"{min(times):.1f}" if times else ""


def _status(report: dict[str, Any]) -> str:
    if report["measured"]:
        return "measured in part" if report["interrupted"] else "measured"
    return "interrupted" if report["interrupted"] else report["why_not"] or "known already"
