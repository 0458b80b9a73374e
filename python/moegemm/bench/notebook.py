"""A record of moegemm-bench in a notebook: its page and pictures in place of a dict."""

import base64
import json
import os
import tempfile
from pathlib import Path

from moegemm.bench.cli import KINDS, module_of
from moegemm.bench.pages import report
from moegemm.bench.record import with_derived

PRODUCT = {"model", "tokens", "routing", "op", "contenders"}  # what the page reads of a case


class BenchRecord:
    """What a run of moegemm-bench measured: `record` is its JSON. Prints its summary; in a notebook it is its page."""

    def __init__(self, record: report.Record) -> None:
        self.record = record

    @property
    def kind(self) -> str:
        """What was measured instead of products; empty: products."""
        return str(self.record.get("kind", ""))

    def __repr__(self) -> str:
        run, cases = self.record["run"], self.record["cases"]
        count = len(cases) + len(self.record.get("held_out", {"cases": ()})["cases"])
        where = f"{run['gpu']}, {run['dtype']}, {run['date']}: {count} cases{f' of {self.kind}' if self.kind else ''}"
        return where if self.kind else "\n".join([where, *report.summary_lines(cases)])

    def _repr_markdown_(self) -> str:
        if self.kind:
            return str(module_of(self.kind).to_markdown(self.record))
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
    record: report.Record = json.loads(Path(path).read_text())
    listed = {"run", "models", "cases"} <= set(record)
    products = listed and "kind" not in record and all(set(case) >= PRODUCT for case in record["cases"])
    if not products and not (listed and record.get("kind") in KINDS):
        kinds = " or ".join(f"--{kind}" for kind in KINDS)
        raise ValueError(
            f"{path} is no record of moegemm-bench; JSON files that it wrote are accepted, of products or "
            f"with {kinds}. What the programs in benchmarks/ write is shown by the page beside it"
        )
    return BenchRecord(with_derived(record))
