"""Times moegemm's products beside what a user would pick instead: torch's grouped_mm with the copies its user makes, a
loop over experts, any other library that is installed, and one dense product of the same FLOPs as the ceiling.

All contenders of a case take turns in one process, every result is checked against an fp32 reference on samples, and
the record is written as JSON (after each case), Markdown and pictures. benchmarks/README.md explains the method.
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import moegemm
from moegemm.bench.cases import (
    CPU_HEADLINE_TOKENS,
    CPU_MODELS,
    CPU_TOKENS,
    DEFAULT_MODELS,
    DEFAULT_TOKENS,
    HEADLINE_TOKENS,
    LEAST_GRADIENT_TOKENS,
    OPS,
    ROUTINGS,
    Case,
    ordered_cases,
    read_catalogue,
    small_gradients,
)
from moegemm.bench.pages import report
from moegemm.bench.program import number, numbers, require_device, seconds, words
from moegemm.bench.progress import Progress
from moegemm.bench.record import add_render_option, load_record, read_to_render, write_json
from moegemm.formats import FORMATS
from moegemm.operators.errors import explain
from moegemm.operators.loading import ops

# Less than two minutes with starting and drawing.
CPU_SECONDS = 95.0
BUDGET_SECONDS = 0.25
SMALLEST = "demo"  # for trying things out; not a published model
# What is measured instead of products, each by the module of its name, and the folder of such a record in a checkout.
KINDS = {"planner": "planner", "lora": "layer", "quantised": "quantised"}
PRODUCTS = "products"
# The options that only some of them read. Another one would do nothing, and the record would not say so.
READ_BY = {
    **dict.fromkeys(("backend", "routing", "all_kernels", "no_peers", "untuned_peers", "no_passes"), (PRODUCTS,)),
    **dict.fromkeys(("budget", "layers", "seed", "beside_torch"), ("planner",)),
    "formats": ("quantised",),
    "ops": (PRODUCTS, "planner", "quantised"),
    "dtype": (PRODUCTS, "planner", "lora"),
    "seconds": (PRODUCTS, "planner"),
    "rounds": (PRODUCTS, "lora", "quantised"),
}


def choice_of(accepted: tuple[str, ...]) -> Any:
    def read(text: str) -> list[str]:
        chosen = words(text)
        unknown = [word for word in chosen if word not in accepted]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"{text!r}; accepted are {','.join(accepted)}")
        return chosen

    return read


def weight_formats(text: str) -> list[str]:
    nothing = torch.empty((0, 0, 0), dtype=torch.uint8, device="meta")
    for word in (given := words(text) or [text]):
        try:
            ops.dequantize(nothing, nothing, word, torch.bfloat16)
        except RuntimeError as error:
            refusal = str(explain(error, {}))
            if refusal.startswith("w_format "):  # others are of a tensor that is none
                raise argparse.ArgumentTypeError(refusal) from None
    return given


def gpu_backend(text: str) -> str:
    known = [backend["name"] for backend in moegemm.info()["backends"] if backend["name"] not in ("cpu", "reference")]
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted are {','.join(known) or 'none: built without CUDA'}")
    return text


def place_of(kind: str, records: Path | None) -> tuple[Path, str]:
    """Folder and file name of a record: "planner", "lora", "quantised", or device and forced backend as in "cuda-sm80".
    A checkout puts each record in a folder of `records`."""
    if records is None:
        return Path("moegemm-bench"), kind
    if kind in KINDS:
        return records / KINDS[kind], kind
    device, _, backend = kind.partition("-")
    if device == "cpu":
        return records / "cpu", "products"
    return records / ("sm80" if backend == "sm80" else "hopper"), "hopper" + (f"-{backend}" if backend else "")


def module_of(kind: str) -> Any:
    """Only where it is wanted: each imports what it measures."""
    return importlib.import_module(f"moegemm.bench.kinds.{kind}")


def kind_of_products(device: str, backend: str | None) -> str:
    return f"{device}-{backend}" if backend else device


def kind_of(record: report.Record) -> str:
    run = record["run"]
    return str(record.get("kind") or kind_of_products(run.get("device", "cuda"), run.get("backend")))


def read_options(arguments: Sequence[str] | None, records: Path | None) -> argparse.Namespace:
    catalogue = read_catalogue()
    parser = argparse.ArgumentParser(
        prog="moegemm-bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), help="default: cuda where torch sees a GPU")
    add("--backend", type=gpu_backend, help="force one, in a record of its own (default: the planner chooses)")
    add("--models", type=choice_of(tuple(catalogue)), help=f"default: {','.join(DEFAULT_MODELS)}; on a CPU fewer")
    add("--tokens", type=numbers, help="comma-separated; default: " + ",".join(map(str, DEFAULT_TOKENS)))
    add("--routing", type=choice_of(ROUTINGS), help=f"default: {','.join(ROUTINGS)}; on a CPU random")
    add("--ops", type=choice_of(OPS), help=f"default: {','.join(OPS)}; gradients from {LEAST_GRADIENT_TOKENS} tokens")
    add("--dtype", choices=[known.name for known in FORMATS.values()], help="default: bf16")
    add("--rounds", type=number, help="timed rounds per case (default: 30, on a CPU 5; at least 20 for a GPU record)")
    add("--heat", type=seconds, default=2.0, metavar="SECONDS", help="dense products before the first case")
    add("--seconds", type=seconds, help=f"start no case that may end later than this (default: on a CPU {CPU_SECONDS})")
    add("--all-kernels", action="store_true", help="time every compiled kernel beside the chosen one")
    add("--no-peers", action="store_true", help="leave out other libraries")
    add("--untuned-peers", action="store_true", help="other libraries use their heuristics: tuning takes some minutes")
    add("--no-passes", action="store_true", help="leave out route and combine")
    add_kind = parser.add_mutually_exclusive_group().add_argument
    add_kind("--planner", action="store_true", help="compare the planner's choice with every compiled kernel instead")
    add_kind("--lora", action="store_true", help="time LoRA on one expert layer through PEFT instead")
    add_kind("--quantised", action="store_true", help="time products with quantised weights beside bf16 ones instead")
    add("--formats", type=weight_formats, help="--quantised: for instance mxfp4,fp8/128x128; default: all")
    add("--budget", type=seconds, metavar="SECONDS", help=f"--planner: per problem (default: {BUDGET_SECONDS})")
    add("--layers", type=number, metavar="COUNT", help="--planner: layers drawn at random beside the catalogue's")
    add("--seed", type=int, help="--planner: of those layers")
    add("--beside-torch", action="store_true", help="--planner: time torch + copies beside the planner's choice")
    add("--commit", help="commit that is measured (default: ask git)")
    add("--append", type=Path, metavar="JSON", help="keep the cases of this record and measure only the missing ones")
    add_render_option(parser)
    where = "moegemm-bench" if records is None else f"the record's in {records}"
    add("--stem", help="file name of the record (default: by device and backend)")
    add("--out", type=Path, help=f"folder (default: {where})")
    options = parser.parse_args(arguments)
    if not options.render:
        refuse_unread(parser, options)
    elif not options.render.is_file():
        parser.error(f"argument --render: {options.render} is no file")
    complete(options, catalogue, records)
    return options


def refuse_unread(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    measured = next((kind for kind in KINDS if getattr(options, kind)), PRODUCTS)
    for option, readers in READ_BY.items():
        if getattr(options, option) not in (None, False) and measured not in readers:
            meant = f"--{measured} does not read it" if PRODUCTS in readers else f"it goes with --{readers[0]}"
            parser.error(f"argument --{option.replace('_', '-')}: {meant}")


def complete(options: argparse.Namespace, catalogue: dict[str, Any], records: Path | None) -> None:
    """The defaults that depend on the device or on one another."""
    if options.device is None and not options.render:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cpu = options.device == "cpu"
    options.headline = CPU_HEADLINE_TOKENS if on_cpu else HEADLINE_TOKENS
    if options.render:
        kind = kind_of(json.loads(options.render.read_text()))
    else:
        products = kind_of_products(options.device, options.backend)
        kind = next((kind for kind in KINDS if getattr(options, kind)), products)
    folder, stem = place_of(kind, records)
    options.out = options.out or folder
    options.stem = options.stem or stem
    if options.planner:
        from moegemm.bench.kinds.planner import LAYERS, SEED, TOKENS

        options.layers = LAYERS if options.layers is None else options.layers
        options.seed = SEED if options.seed is None else options.seed
        options.budget = BUDGET_SECONDS if options.budget is None else options.budget
        options.models = options.models or [name for name in catalogue if name != SMALLEST]
        options.tokens = options.tokens or list(TOKENS)
    if options.lora:
        from moegemm.bench.kinds import lora

        options.models = options.models or (None if on_cpu else list(lora.MODELS))
        options.tokens = options.tokens or list(lora.CPU_TOKENS if on_cpu else lora.TOKENS)
    if options.quantised:
        from moegemm.bench.kinds import quantised

        options.models = options.models or (["qwen3-30b-a3b"] if on_cpu else list(quantised.MODELS))
        options.tokens_of_weights = options.tokens or (list(quantised.CPU_TOKENS) if on_cpu else None)
        options.formats = options.formats or list(quantised.FORMATS)
        options.ops = [op for op in options.ops or quantised.OPS if op in quantised.OPS]
    options.models = options.models or list(CPU_MODELS if on_cpu else DEFAULT_MODELS)
    options.tokens = options.tokens or list(CPU_TOKENS if on_cpu else DEFAULT_TOKENS)
    # Who names gradients and small batches alone wants just these.
    named = options.ops is not None and max(options.tokens) < LEAST_GRADIENT_TOKENS
    options.least = 1 if named else min(LEAST_GRADIENT_TOKENS, options.headline)
    options.ops = options.ops or list(OPS)
    options.routing = options.routing or (["random"] if on_cpu else list(ROUTINGS))
    options.rounds = options.rounds or (5 if on_cpu else 30)
    options.dtype = options.dtype or "bf16"
    if options.seconds is None:
        options.seconds = CPU_SECONDS if on_cpu and not options.planner else float("inf")
    options.models = [catalogue[name] for name in dict.fromkeys(options.models)]


def render(record: report.Record, folder: Path, stem: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (kind := record.get("kind")) in KINDS:
        (folder / f"{stem}.md").write_text(module_of(kind).to_markdown(record))
        return
    figures: list[tuple[str, str]] = []
    try:
        from moegemm.bench.pages import plots

        figures = [(path.name, what) for path, what in plots.draw(record, folder, stem)]
    except ImportError as error:
        print(f"no pictures: {error}; --render draws them where matplotlib is installed", file=sys.stderr)
    (folder / f"{stem}.md").write_text(report.to_markdown(record, figures))


def read_earlier(path: Path | None, run: dict[str, Any]) -> report.Record:
    """The record to add to. Numbers of another commit, GPU or dtype do not belong in one table."""
    if path is None or not path.is_file():
        return {"format": 1, "run": run, "models": {}, "cases": []}
    earlier: report.Record = load_record(path)
    for fact in ("commit", "gpu", "dtype", "backend"):
        then, now = earlier["run"].get(fact), run.get(fact)
        if then != now:
            sys.exit(f"--append {path}: measured with {fact} {then}, this run has {now}")
    return earlier


def missing_cases(options: argparse.Namespace, record: report.Record) -> list[Case]:
    """What was asked for and is not in the record; tells what is left out of it."""
    if small := small_gradients(options.tokens, options.ops, options.least):
        why = "as nobody trains on so few; --ops and --tokens of these alone run them"
        print(f"left out: {small}, {why}", file=sys.stderr)
    done = {(c["model"], c["tokens"], c["routing"], c["op"]) for c in record["cases"]}
    cases = ordered_cases(options.models, options.tokens, options.routing, options.ops, options.headline, options.least)
    return [case for case in cases if case.key not in done]


def begin_record(options: argparse.Namespace, root: Path, **facts: Any) -> report.Record:
    """A record without cases, or the one to add to, on a device that is ready."""
    import torch

    from moegemm.bench import machine

    require_device(options.device)
    torch.manual_seed(0)
    run = machine.describe(options.device, options.dtype, options.rounds, options.commit or machine.commit_of(root))
    record = read_earlier(options.append, run | facts)
    for model in options.models:
        record["models"][model.name] = vars(model)
    return record


def finish_record(options: argparse.Namespace, record: report.Record, summary: list[str], begin: float) -> None:
    from moegemm.bench import machine

    record["run"]["gpu_state_at_end"] = machine.gpu_state()
    write_json(record, options.out, options.stem)
    render(record, options.out, options.stem)
    print("\n".join(summary))
    print(f"{options.out / options.stem}.md, {time.monotonic() - begin:.0f} s")


@contextmanager
def ending_early() -> Iterator[Callable[[int], None]]:
    """Ctrl-C ends the measurement inside, not the program. Hands out what tells of cases that were not reached."""

    def tell(unreached: int) -> None:
        if unreached:
            print(f"{unreached} cases not measured: --seconds is used up (--append continues)", file=sys.stderr)

    try:
        yield tell
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)


def measure_passes(options: argparse.Namespace, record: report.Record, clock: Any, dtype: Any) -> None:
    from moegemm.bench.passes import measure_combine, measure_route

    given = (options.device, dtype, options.rounds, HEADLINE_TOKENS)
    for name, call in (
        ("route", lambda: measure_route(clock, options.device, options.rounds, HEADLINE_TOKENS)),
        ("combine", lambda: measure_combine(clock, options.models, *given)),
    ):
        try:
            record[name] = call()
        except RuntimeError as error:
            print(f"{name} left out: {error}", file=sys.stderr)


def measure(options: argparse.Namespace, root: Path) -> int:
    from moegemm.bench.measure import DTYPES, DeviceLostError, Measurement, Settings
    from moegemm.bench.peers import importable_peers
    from moegemm.bench.timing import Clock, copy_bytes_per_s

    begin = time.monotonic()
    forced = {"backend": options.backend} if options.backend else {}
    if options.backend:
        os.environ["MOEGEMM_BACKEND"] = options.backend
    record = begin_record(options, root, headline_tokens=options.headline, **forced)
    record["cases"] = [c for c in record["cases"] if not c.get("skipped")]
    cases = missing_cases(options, record)

    clock = Clock(options.device)
    clock.heat(options.heat)
    record["run"].setdefault("memory_bytes_per_s", copy_bytes_per_s(clock, options.device))
    dtype = DTYPES[options.dtype]
    if options.device == "cuda" and not options.no_passes and "route" not in record:
        measure_passes(options, record, clock, dtype)

    def keep(entry: dict[str, Any]) -> None:
        record["cases"].append(entry | forced)
        write_json(record, options.out, options.stem)

    deadline = begin + options.seconds
    peers = None if options.no_peers else importable_peers(not options.untuned_peers)
    if peers is not None:
        record["run"]["peers"] = {"found": peers.versions, "missing": peers.missing, "tuned": not options.untuned_peers}
    settings = Settings(options.device, dtype, options.rounds, options.all_kernels, peers, deadline)
    lost = False
    with ending_early() as tell_unreached:
        try:
            tell_unreached(Measurement(settings, clock).run(cases, keep))
        except DeviceLostError as error:
            lost = True
            print(f"stopped: {error}", file=sys.stderr)
    finish_record(options, record, report.summary_lines(record["cases"]), begin)
    wrong = any(not c["contenders"].get("ours", {}).get("correct", True) for c in record["cases"])
    return 1 if wrong or lost else 0


def measure_planner(options: argparse.Namespace, root: Path) -> int:
    from moegemm.bench.kinds import planner
    from moegemm.bench.measure import DTYPES
    from moegemm.bench.timing import Clock

    begin = time.monotonic()
    facts = {"budget_seconds": options.budget, "measured_twice": True}
    record = begin_record(options, root, **facts) | {"kind": "planner"}
    ranges = planner.ON_CPU if options.device == "cpu" else planner.ON_GPU
    drawn = planner.layer_cases(options.layers, options.seed, ranges)
    listed = [vars(model) for model in dict.fromkeys(case.model for case in drawn)]
    layers = record.setdefault("held_out", {"seed": options.seed, "models": listed, "cases": []})
    if layers["models"] != listed:
        sys.exit(f"--append {options.append}: its layers are others than those of --layers and --seed")
    print(f"layers drawn: {options.layers}, seed {options.seed}", file=sys.stderr)
    clock = Clock(options.device)
    clock.heat(options.heat)
    settings = planner.Settings(
        options.device, DTYPES[options.dtype], options.budget, begin + options.seconds,
        clock if options.beside_torch else None,
    )  # fmt: skip
    # The layers first: a run that ends early has measured what matters.
    tables = ((layers, drawn), (record, planner.cases_of(options.models, options.tokens)))
    with ending_early() as tell_unreached:
        unreached = 0
        for place, cases in tables:
            wanted = [case for case in cases if case.op in options.ops]
            done = {(c["model"], c["op"], c["tokens"]) for c in place["cases"]}
            missing = [case for case in wanted if (case.model.name, case.op, case.tokens) not in done]
            with Progress(len(wanted), len(place["cases"])) as progress:
                keep = planner_keeper(place["cases"], progress, lambda: write_json(record, options.out, options.stem))
                unreached += planner.measure(missing, settings, keep)
        tell_unreached(unreached)
    summary = [line for place, _ in tables for line in planner.quality_lines(place["cases"])]
    finish_record(options, record, summary, begin)
    return 0


def measure_layers(options: argparse.Namespace, root: Path, kind: str) -> int:
    """Cases of "lora" or "quantised", each kept as soon as it is there."""
    from moegemm.bench.measure import DTYPES
    from moegemm.bench.timing import Clock

    begin = time.monotonic()
    module = module_of(kind)
    record = begin_record(options, root) | {"kind": kind}
    done = {tuple(case[field] for field in ("model", "tokens", "op") if field in case) for case in record["cases"]}
    if kind == "quantised":
        cases = module.cases_of(options.models, options.tokens_of_weights, options.ops)
        count = len(cases)
        missing = [(model, *rest) for model, *rest in cases if (model.name, *rest) not in done]
        measure_all = partial(module.measure, missing, options.formats, options.device, options.rounds)
    else:
        count = len(options.models) * len(set(options.tokens))
        given = (options.models, options.tokens, options.device, DTYPES[options.dtype], options.rounds)
        measure_all = partial(module.measure, *given, done=done)
    clock = Clock(options.device)
    clock.heat(options.heat)
    with Progress(count, len(done)) as progress:

        def keep(entry: dict[str, Any]) -> None:
            record["cases"].append(entry)
            write_json(record, options.out, options.stem)
            progress.step(module.words_of(entry))

        with ending_early():
            measure_all(clock=clock, keep=keep)
    finish_record(options, record, [module.words_of(entry) for entry in record["cases"]], begin)
    return 0


def planner_keeper(entries: list[dict[str, Any]], progress: Progress, write: Callable[[], None]) -> Callable[..., None]:
    """Takes entries, tells how far it is, and writes the record now and then."""

    def keep(entry: dict[str, Any]) -> None:
        entries.append(entry)
        words = "one kernel" if entry["only_kernel"] else f"{entry['reached']:.3f} with {entry['heuristic']}"
        words = entry.get("skipped", words)
        progress.step(f"{entry['model']} T={entry['tokens']} {entry['op']}: {words}")
        if len(entries) % 20 == 0:
            write()

    return keep


def main(arguments: Sequence[str] | None = None, *, records: Path | None = None) -> int:
    """The program; `records` is where a checkout puts its records."""
    options = read_options(arguments, records)
    root = Path(__file__).resolve().parents[3]
    if options.render:
        render(read_to_render(options.render, options.out, options.stem), options.out, options.stem)
        return 0
    if options.lora or options.quantised:
        return measure_layers(options, root, "lora" if options.lora else "quantised")
    return measure_planner(options, root) if options.planner else measure(options, root)


if __name__ == "__main__":
    sys.exit(main())
