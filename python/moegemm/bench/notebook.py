"""A record of moegemm-bench in a notebook: its page and pictures in place of a dict."""

import base64
import os
import tempfile
from pathlib import Path

from moegemm.bench.pages import report
from moegemm.bench.record import load_record


class BenchRecord:
    """What a run of moegemm-bench measured: `record` is its JSON. Prints its summary; in a notebook it is its page."""

    def __init__(self, record: report.Record) -> None:
        self.record = record

    def __repr__(self) -> str:
        run = self.record["run"]
        where = f"{run['gpu']}, {run['dtype']}, {run['date']}: {len(self.record['cases'])} cases"
        return "\n".join([where, *report.summary_lines(self.record["cases"])])

    def _repr_markdown_(self) -> str:
        return report.to_markdown(self.record, self._pictures())

    def _pictures(self) -> list[tuple[str, str]]:
        """Inside the page, as there is no file beside it; none where matplotlib is missing."""
        from moegemm.bench.pages import plots

        with tempfile.TemporaryDirectory() as folder:
            try:
                drawn = plots.draw(self.record, Path(folder), "record")
            except ImportError:
                return []
            return [(f"data:image/png;base64,{base64.b64encode(p.read_bytes()).decode()}", what) for p, what in drawn]


def read_record(path: str | os.PathLike[str]) -> BenchRecord:
    """The record that moegemm-bench wrote to a JSON file."""
    record: report.Record = load_record(Path(path))
    if record.get("kind") == "planner" or "cases" not in record:
        raise ValueError(f"{path} is no record of products; a JSON file that moegemm-bench wrote is accepted")
    return BenchRecord(record)
