"""The file of a record: in full while measuring, in a small form beside the page that the repository keeps."""

import argparse
import json
from pathlib import Path
from typing import Any

from moegemm.bench.cases import Case, Model

# Read by no page: spreads, limits and what follows from the model.
UNREAD = {
    "ms_p10", "ms_p90", "error_limit", "n", "k", "largest_expert_rows", "ours_quartiles_ms", "torch_quartiles_ms",
    "pruned", "tflop",
}  # fmt: skip
DERIVED = {"rows", "flops", "weight_bytes"}  # of a case of products; `with_derived` has them again
SIGNIFICANT_DIGITS = 6  # a table shows four at most, and rounding twice must not move its last one


def add_render_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--render",
        type=Path,
        metavar="JSON",
        help="measure nothing: write page and pictures of this record, and its small form, to the folder of the record",
    )


def small_form(value: Any) -> Any:
    """What pages and tests read of a record, in as many digits as mean something. Its own small form is the same."""
    if isinstance(value, dict):
        left_out = UNREAD | (DERIVED if "flops" in value else set())
        if value.get("correct"):  # what is not said to be wrong is right, and only of a wrong result the error is told
            left_out = left_out | {"correct"} | ({"error"} if "ms" in value else set())
        return {key: small_form(item) for key, item in value.items() if key not in left_out}
    if isinstance(value, list | tuple):
        return [small_form(item) for item in value]
    if isinstance(value, float):
        rounded = value if value.is_integer() else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        return int(rounded) if rounded.is_integer() else rounded
    return value


def element_bytes_of(run: dict[str, Any]) -> int:
    return 4 if run["dtype"] == "fp32" else 2


def with_derived(record: dict[str, Any]) -> dict[str, Any]:
    """The record with what its small form leaves out of cases of products: it follows from model, op and tokens."""
    for entry in () if "kind" in record else record.get("cases", ()):
        if "routing" in entry and "flops" not in entry:
            model = Model(**record["models"][entry["model"]])
            case = Case(model, entry["tokens"], entry["routing"], entry["op"])
            entry |= {"rows": case.rows, "flops": case.flops}
            if "touched_experts" in entry:  # not where the case was skipped
                _, n, k = model.weight_shape(case.op)
                entry["weight_bytes"] = entry["touched_experts"] * n * k * element_bytes_of(record["run"])
    return record


def load_record(path: Path) -> dict[str, Any]:
    return with_derived(json.loads(path.read_text()))


def to_text(value: Any) -> str:
    """JSON with one line for each entry of a list, so that a diff shows which case changed."""
    if isinstance(value, dict) and any(_has_entries(item) for item in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {to_text(item)}" for key, item in value.items()) + "\n}"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(_line(item) for item in value) + "\n]"
    return _line(value)


def _has_entries(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(item, dict | list) for item in inside)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))  # an error that is NaN too: a wrong result must not lose the run


def write_json(record: dict[str, Any], folder: Path, stem: str) -> None:
    """Whole or not at all: a run that is killed while writing leaves the record before it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(to_text(record) + "\n")
    partial.replace(path)


def read_to_render(source: Path, folder: Path, stem: str) -> dict[str, Any]:
    """The record in `source` as its small form tells it, which is also written to `folder` unless that is where it
    comes from."""
    record: dict[str, Any] = small_form(json.loads(source.read_text()))
    if (folder / f"{stem}.json").resolve() != source.resolve():
        write_json(record, folder, stem)
    return with_derived(record)
