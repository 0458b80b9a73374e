"""What the programs of benchmarks/ have in common: their options, and a record that grows case by case."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from moegemm.bench.cases import read_catalogue
from moegemm.bench.machine import commit_of, describe
from moegemm.bench.record import add_render_option, read_to_render, write_json
from moegemm.bench.timing import Clock

ROOT = Path(__file__).resolve().parents[3]
Record = dict[str, Any]


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; a number of at least 1 is accepted")
    return int(text)


def numbers(text: str) -> list[int]:
    given = words(text)
    if not given or not all(word.isdecimal() and int(word) for word in given):
        raise argparse.ArgumentTypeError(f"{text!r}; a comma-separated list of positive numbers is accepted")
    return [int(word) for word in given]


def seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}; a number of seconds is accepted")


def layer_parser(description: str | None, models: Sequence[str], rounds: int, folder: str) -> argparse.ArgumentParser:
    """Of a program that measures layers of published models; the options that all of them have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(models), choices=list(read_catalogue()), metavar="NAME",
        help=f"default: {' '.join(models)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=number, default=rounds, help="timed rounds (default: %(default)s)")
    add_record_options(parser, folder)
    return parser


def add_record_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """Where the record goes, by default to this folder of build/bench, and what it says of itself."""
    parser.add_argument("--heat", type=seconds, default=2.0, help="seconds of matrix products first, on a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / folder, help="folder of the record")
    parser.add_argument("--commit", default=None, help="what to record as the commit, where there is no repository")
    add_render_option(parser)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"], help="default: cuda where torch sees one")


def require_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; --device cpu measures there, --render redraws an existing record")


def started(options: argparse.Namespace, device: str, dtype: str, **facts: Any) -> tuple[Record, Clock]:
    """What a record says of its run, and a clock on a device that is ready."""
    require_device(device)
    clock = Clock(device)
    run = describe(device, dtype, options.rounds, options.commit or commit_of(ROOT))
    clock.heat(options.heat)
    return {"run": run | facts}, clock


def measure_each(
    options: argparse.Namespace, stem: str, record: Record, cases: Sequence[Any], measure: Callable[..., Record],
    words: Callable[[Record], str], listed: str = "cases",
) -> None:  # fmt: skip
    """Adds measure(*case) for each case to the list of the record, and writes it: a run that is cut short leaves what
    it has. `words` says what a case has come to."""
    record[listed] = []
    for done, case in enumerate(cases, start=1):
        entry = measure(*case)
        record[listed].append(entry)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"[{done}/{len(cases)}] {words(entry)}", file=sys.stderr)
        write_json(record, options.out, stem)


def render_or_measure(
    options: argparse.Namespace, stem: str, show: Callable[[Record, Path], None],
    measure: Callable[[argparse.Namespace], Record],
) -> None:  # fmt: skip
    """Shows the record that --render names, or a new one."""
    show(read_to_render(options.render, options.out, stem) if options.render else measure(options), options.out)
