#!/usr/bin/env python3
"""Times moegemm's products on a GPU beside dense cuBLAS and torch's grouped_mm with the copies its user makes.

All contenders of a case take turns in one process, every result is checked against an fp32 reference on samples, and
the record is written as JSON (after each case), Markdown and a picture. benchmarks/README.md explains the method.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from grouped import report
from grouped.cases import DEFAULT_MODELS, DEFAULT_TOKENS, HEADLINE_TOKENS, OPS, ROUTINGS, ordered_cases, read_catalogue

ROOT = Path(__file__).resolve().parent.parent
STEM = "hopper"


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    counts = [int(word) for word in words(text)]
    if min(counts, default=0) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a comma-separated list of positive numbers is accepted")
    return counts


def choice_of(accepted: tuple[str, ...]) -> Any:
    def read(text: str) -> list[str]:
        chosen = words(text)
        unknown = [word for word in chosen if word not in accepted]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted are {','.join(accepted)}")
        return chosen

    return read


def read_options() -> argparse.Namespace:
    catalogue = read_catalogue()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=choice_of(tuple(catalogue)), default=list(DEFAULT_MODELS), help="of data/models.json")
    add("--tokens", type=numbers, default=list(DEFAULT_TOKENS), help="default: %(default)s")
    add("--routing", type=choice_of(ROUTINGS), default=list(ROUTINGS), help="default: %(default)s")
    add("--ops", type=choice_of(OPS), default=list(OPS), help="default: %(default)s")
    add("--dtype", choices=("bf16", "fp16"), default="bf16")
    add("--rounds", type=int, default=30, help="timed rounds per case (default: %(default)s; at least 20 for a record)")
    add("--heat", type=float, default=2.0, metavar="SECONDS", help="dense products before the first case")
    add("--seconds", type=float, default=float("inf"), help="start no case that may end later than this")
    add("--all-kernels", action="store_true", help="time every compiled kernel beside the chosen one")
    add("--no-row-kernels", action="store_true", help="leave out route and combine")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, its times mean nothing")
    add("--commit", help="commit that is measured (default: ask git)")
    add("--append", type=Path, metavar="JSON", help="keep the cases of this record and measure only the missing ones")
    add("--render", type=Path, metavar="JSON", help="write Markdown and picture of this record; measure nothing")
    add("--out", type=Path, default=ROOT / "docs" / "benchmarks", help="folder (default: docs/benchmarks)")
    options = parser.parse_args()
    options.models = [catalogue[name] for name in dict.fromkeys(options.models)]
    return options


def write_json(record: report.Record, folder: Path) -> None:
    """Whole or not at all: a run that is killed while writing leaves the record before it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{STEM}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def render(record: report.Record, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[Path] = []
    try:
        from grouped import plots

        figures = plots.draw(record, folder, STEM)
    except ImportError as error:
        print(f"no picture: {error}; --render draws it where matplotlib is installed", file=sys.stderr)
    text = report.to_markdown(record, figures[0].name if figures else None)
    (folder / f"{STEM}.md").write_text(text)


def read_earlier(path: Path | None, run: dict[str, Any]) -> report.Record:
    """The record to add to. Numbers of another commit, GPU or dtype do not belong in one table."""
    if path is None or not path.is_file():
        return {"format": 1, "run": run, "models": {}, "cases": []}
    earlier = json.loads(path.read_text())
    for fact in ("commit", "gpu", "dtype"):
        if earlier["run"][fact] != run[fact]:
            sys.exit(f"--append {path}: measured with {fact} {earlier['run'][fact]}, this run has {run[fact]}")
    return earlier


def measure(options: argparse.Namespace) -> int:
    try:
        import moegemm  # noqa: F401 - an installed package comes first
    except ModuleNotFoundError:
        sys.path.insert(0, str(ROOT / "python"))
    import torch
    from grouped import machine
    from grouped.measure import DTYPES, DeviceLostError, Measurement, Settings
    from grouped.row_kernels import measure_combine, measure_route
    from grouped.timing import Clock

    begin = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu is a dry run, --render redraws an existing record")
    torch.manual_seed(0)
    dtype = DTYPES[options.dtype]
    run = machine.describe(options.device, options.dtype, options.rounds, options.commit or machine.commit_of(ROOT))
    record = read_earlier(options.append, run)
    for model in options.models:
        record["models"][model.name] = vars(model)
    done = {(c["model"], c["tokens"], c["routing"], c["op"]) for c in record["cases"] if not c.get("skipped")}
    record["cases"] = [c for c in record["cases"] if not c.get("skipped")]
    cases = ordered_cases(options.models, options.tokens, options.routing, options.ops)
    cases = [case for case in cases if case.key not in done]

    clock = Clock(options.device)
    clock.heat(options.heat)
    if not options.no_row_kernels and "route" not in record:
        tokens = HEADLINE_TOKENS if options.device == "cuda" else 64
        device, rounds = options.device, options.rounds
        for name, call in (
            ("route", lambda: measure_route(clock, device, rounds, tokens)),
            ("combine", lambda: measure_combine(clock, options.models, device, dtype, rounds, tokens)),
        ):
            try:
                record[name] = call()
            except RuntimeError as error:
                print(f"{name} left out: {error}", file=sys.stderr)

    def keep(entry: dict[str, Any]) -> None:
        record["cases"].append(entry)
        write_json(record, options.out)

    settings = Settings(options.device, dtype, options.rounds, options.all_kernels, begin + options.seconds)
    lost = False
    try:
        unreached = Measurement(settings, clock).run(cases, keep)
        if unreached:
            print(f"{unreached} cases not measured: --seconds is used up (--append continues)", file=sys.stderr)
    except DeviceLostError as error:
        lost = True
        print(f"stopped: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)
    record["run"]["gpu_state_at_end"] = machine.gpu_state()
    write_json(record, options.out)
    render(record, options.out)
    print("\n".join(report.summary_lines(record["cases"])))
    print(f"{options.out / STEM}.md, {time.monotonic() - begin:.0f} s")
    wrong = any(not c["contenders"].get("ours", {}).get("correct", True) for c in record["cases"])
    return 1 if wrong or lost else 0


def main() -> int:
    options = read_options()
    if options.render:
        render(json.loads(options.render.read_text()), options.out)
        return 0
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
