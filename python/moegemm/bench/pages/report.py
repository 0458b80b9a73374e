"""The record as Markdown. Works from the JSON alone, on any machine."""

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from moegemm.bench.cases import DECODE_TOKENS, HEADLINE_TOKENS, OPS
from moegemm.bench.pages.targets import (
    AT_8192,
    COMBINE_OF_COPY,
    DECODE,
    MMA_SYNC_TFLOPS,
    READ_BYTES_PER_S,
    ROUTE_US,
    SM80_AT_8192,
    SM80_DECODE,
)

Record = dict[str, Any]
Entry = dict[str, Any]

MISSING = "–"  # noqa: RUF001 - an en dash reads as "nothing here" in a table


def milliseconds(case: Entry, name: str) -> float | None:
    """The median of a contender that ran and was right."""
    contender = case["contenders"].get(name, {})
    return contender.get("ms") if contender.get("correct", True) else None


def tflops(case: Entry, name: str) -> float | None:
    ms = milliseconds(case, name)
    return None if ms is None else case["flops"] / ms * 1e-9


def speedup(case: Entry, over: str) -> float | None:
    """How many times faster ours is than `over`."""
    mine, theirs = milliseconds(case, "ours"), milliseconds(case, over)
    return None if mine is None or theirs is None else theirs / mine


def sm80_target(case: Entry) -> float | None:
    """TFLOP/s that the sm80 backend should reach."""
    return SM80_AT_8192.get(case["model"], {}).get(case["op"][:-1])


def meets_target(case: Entry) -> bool | None:
    """None where nothing was promised or measured."""
    if case["tokens"] != HEADLINE_TOKENS or case["routing"] != "random":
        return None
    if case.get("backend") == "sm80":
        rate, least = tflops(case, "ours"), sm80_target(case)
        return None if rate is None or least is None else round(rate) >= least
    target = AT_8192.get(case["model"], {}).get(case["op"])
    if target is None:
        return None
    of_dense, of_torch = speedup(case, "dense"), speedup(case, "torch")
    if of_dense is None:
        return None
    # Two digits are what a target has.
    return round(of_dense, 2) >= target.of_dense and (of_torch is None or round(of_torch, 2) >= target.of_torch)


def over_floor(case: Entry) -> float | None:
    """Time over that of reading the touched weights once."""
    ms = milliseconds(case, "ours")
    return None if ms is None else ms * 1e-3 * READ_BYTES_PER_S / case["weight_bytes"]


def decode_target(case: Entry) -> float:
    return SM80_DECODE if case.get("backend") == "sm80" else DECODE[case["op"]]


def meets_decode_target(case: Entry) -> bool | None:
    ratio = over_floor(case)
    if case["tokens"] > DECODE_TOKENS or case["op"] not in DECODE or ratio is None:
        return None
    return round(ratio, 2) <= decode_target(case)


def digits_of(case: Entry) -> int:
    """Digits after the point of a rate in TFLOP/s: three significant ones of ours."""
    rate = tflops(case, "ours")
    return 0 if rate is None or rate >= 10 else 1 if rate >= 1 else 3


def number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def verdict(met: bool | None) -> str:
    return MISSING if met is None else "yes" if met else "**no**"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """The first `left` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def by_model(cases: Iterable[Entry]) -> list[Entry]:
    cases = list(cases)
    place = {name: i for i, name in enumerate(dict.fromkeys(c["model"] for c in cases))}
    return sorted(cases, key=lambda c: (place[c["model"]], c["tokens"], OPS.index(c["op"])))


def headline_of(record: Record) -> int:
    """The token count that the first table and the first picture show."""
    return int(record["run"].get("headline_tokens", HEADLINE_TOKENS))


def rivals(cases: Iterable[Entry]) -> list[str]:
    """Everybody who was measured but us, the ceiling first."""
    seen = dict.fromkeys(name for case in cases for name in case["contenders"] if not name.startswith("ours"))
    known = [name for name in ("dense", "torch", "loop") if name in seen]
    return known + [name for name in seen if name not in known]


LABELS = {"torch": "torch + copies", "loop": "expert loop"}


def headline_table(cases: list[Entry], headline: int) -> list[str]:
    rows = []
    shown = [c for c in cases if c["tokens"] == headline and c["routing"] == "random"]
    others = rivals(shown)
    for case in by_model(shown):
        target = AT_8192.get(case["model"], {}).get(case["op"])
        wanted = MISSING
        if case.get("backend") == "sm80":
            wanted = number(sm80_target(case), 0)
        elif target is not None:
            wanted = f"{target.of_dense:.2f}" + (f" ({target.of_torch:.2f})" if target.of_torch > 1 else "")
        rows.append(
            (
                case["model"],
                case["op"],
                *(number(tflops(case, name), digits_of(case)) for name in (*others, "ours")),
                number(speedup(case, "dense"), 2),
                number(speedup(case, "torch"), 2),
                wanted,
                verdict(meets_target(case)),
            )
        )
    names = [LABELS.get(name, name) for name in others]
    return table(("model", "op", *names, "moegemm", "of dense", "of torch", "target", "met"), rows, 2)


def decode_table(cases: list[Entry], models: dict[str, Entry]) -> list[str]:
    chosen = (
        c
        for c in cases
        if c["tokens"] <= DECODE_TOKENS and c["routing"] == "random" and c["op"] in DECODE and c["contenders"]
    )
    rows = []
    for case in by_model(chosen):
        ms = milliseconds(case, "ours")
        rows.append(
            (
                case["model"],
                case["op"],
                str(case["tokens"]),
                f"{case['touched_experts']} of {models[case['model']]['experts']}",
                number(ms, 4),
                number(None if ms is None else case["weight_bytes"] / ms * 1e-6, 0),
                number(over_floor(case), 2),
                f"{decode_target(case):.2f}",
                verdict(meets_decode_target(case)),
                number(speedup(case, "torch"), 2),
            )
        )
    head = (
        "model", "op", "tokens", "experts touched", "ms", "GB/s", "times floor", "target", "met", "of torch",
    )  # fmt: skip
    return table(head, rows, 2)


def token_table(cases: list[Entry], routing: str) -> list[str]:
    """All token counts of one routing: TFLOP/s, and in brackets times torch."""

    def cell(case: Entry | None) -> str:
        if case is None:
            return MISSING
        over = speedup(case, "torch")
        return number(tflops(case, "ours"), digits_of(case)) + (f" ({over:.2f})" if over is not None else "")

    return table_over_tokens(by_model(c for c in cases if c["routing"] == routing), cell)


def table_over_tokens(entries: Sequence[Entry], cell: Callable[[Entry | None], str]) -> list[str]:
    """A line for each model and op in the order of the entries, a column for each token count."""
    counts = sorted({e["tokens"] for e in entries})
    cells = {(e["model"], e["op"], e["tokens"]): e for e in entries}
    keys = dict.fromkeys((e["model"], e["op"]) for e in entries)
    rows = [[model, op, *(cell(cells.get((model, op, count))) for count in counts)] for model, op in keys]
    return table(("model", "op", *(f"T = {count}" for count in counts)), rows, 2)


def kernel_table(cases: list[Entry]) -> list[str]:
    """Where a kernel beats the planner's choice by more than the measurements scatter."""
    rows = []
    for case in by_model(cases):
        timed = {n: milliseconds(case, n) for n in case["contenders"] if n.startswith("ours ")}
        ran = {name: ms for name, ms in timed.items() if ms is not None}
        chosen = milliseconds(case, "ours")
        if not ran or chosen is None:
            continue
        best = min(ran, key=lambda name: ran[name])
        if chosen > 1.02 * ran[best]:
            rows.append(
                (
                    case["model"],
                    case["op"],
                    case["routing"],
                    str(case["tokens"]),
                    number(chosen, 4),
                    number(ran[best], 4),
                    best.removeprefix("ours "),
                    number(chosen / ran[best], 2),
                )
            )
    head = ("model", "op", "routing", "tokens", "chosen, ms", "best, ms", "best kernel", "lost")
    return table(head, rows, 3) if rows else ["None."]


def pass_lines(record: Record) -> list[str]:
    lines = []
    route = record.get("route")
    if route:
        us = route["ms"] * 1e3
        sizes = f"{route['tokens']} x {route['topk']} over {route['experts']} experts"
        if route.get("correct", True):
            lines += [f"`route`, {sizes}: {us:.1f} microseconds (target {ROUTE_US:.0f}: {verdict(us <= ROUTE_US)})."]
        else:
            lines += [f"`route`, {sizes}: **wrong result**."]
    rows = []
    for entry in record.get("combine", ()):
        rates = {
            name: entry["bytes"] / c["ms"] * 1e-6 if c.get("correct", True) else None
            for name, c in entry["contenders"].items()
        }
        for name in ("weighted", "plain"):
            mine, copied = rates[name], rates["copy"]
            share = None if mine is None or copied is None else mine / copied
            met = None if share is None else round(share, 2) >= COMBINE_OF_COPY
            rows.append(
                (
                    entry["model"],
                    name,
                    f"{entry['tokens']} x {entry['topk']} x {entry['columns']}",
                    number(rates["copy"], 0),
                    number(rates[name], 0),
                    number(share, 2),
                    verdict(met),
                )
            )
    if rows:
        head = ("model", "sum", "tokens x topk x columns", "copy, GB/s", "`combine`, GB/s", "of copy", "met")
        note = f"`combine`, bytes read and written (target {COMBINE_OF_COPY:.2f} of a copy in the same round robin):"
        lines += ["", note, "", *table(head, rows, 3)]
    return lines


def summary_lines(cases: list[Entry]) -> list[str]:
    def tally(judge: Callable[[Entry], bool | None]) -> str:
        judged = [met for met in map(judge, cases) if met is not None]
        return f"{sum(judged)} of {len(judged)}"

    against_torch = {i: r for i, c in enumerate(cases) if (r := speedup(c, "torch")) is not None}
    lines = []
    if any(meets_target(case) is not None for case in cases):
        lines += [f"- Targets at {HEADLINE_TOKENS} tokens met: {tally(meets_target)}."]
        if any(meets_decode_target(case) is not None for case in cases):
            lines += [f"- Decode targets met, all routings: {tally(meets_decode_target)}."]
    lines += [
        f"- At least as fast as torch's `grouped_mm` with copies: {sum(r >= 1 for r in against_torch.values())} of "
        f"{len(against_torch)} cases"
        + (f"; geometric mean {geometric_mean(against_torch.values()):.2f} times." if against_torch else "."),
    ]
    slower = sorted((r, i) for i, r in against_torch.items() if r < 1)
    lines += [f"  - slower: {describe(cases[i])}, {r:.3f} times torch" for r, i in slower[:20]]
    for peer in rivals(cases):
        ratios = [r for c in cases if peer not in ("dense", "torch", "loop") and (r := speedup(c, peer)) is not None]
        if ratios:
            lines.append(
                f"- {geometric_mean(ratios):.2f} times as fast as {peer} in the geometric mean of {len(ratios)} cases, "
                f"{min(ratios):.2f} to {max(ratios):.2f}."
            )
    for case in cases:
        if case.get("skipped"):
            lines.append(f"- Not measured: {describe(case)}: {case['skipped']}.")
        for name, contender in case["contenders"].items():
            if "failure" in contender:
                lines.append(f"- {name} failed: {describe(case)}: {contender['failure']}.")
            elif not contender.get("correct", True):
                what = contender.get("fault") or f"error {contender['error']:.2g}"
                lines.append(f"- **{name} was wrong**: {describe(case)}: {what}.")
    return lines


def describe(case: Entry) -> str:
    return f"{case['model']} {case['op']}, {case['tokens']} tokens, {case['routing']} routing"


def ceiling_lines(cases: list[Entry]) -> list[str]:
    """What share of mma.sync's own rate the sm80 backend reaches."""
    rates = [r for c in cases if c["tokens"] == HEADLINE_TOKENS and (r := tflops(c, "ours")) is not None]
    if not rates:
        return []
    low, high = min(rates) / MMA_SYNC_TFLOPS, max(rates) / MMA_SYNC_TFLOPS
    return [
        "The sm80 backend was forced; on a Hopper GPU it runs only what the sm90 backend refuses. mma.sync alone, from "
        f"registers, reaches {MMA_SYNC_TFLOPS:.0f} TFLOP/s on this chip: at {HEADLINE_TOKENS} tokens these kernels "
        f"reach {low:.2f} to {high:.2f} of it. What limits them, mostly power, is in `docs/kernels/sm80.md`.",
        "",
    ]


def peer_lines(run: dict[str, Any]) -> list[str]:
    """Which other libraries ran, and which could not be imported; older records do not say."""
    peers = run.get("peers")
    if not peers:
        return []
    found = ", ".join(f"{name} {version}" for name, version in peers["found"].items())
    missing = ", ".join(peers["missing"])
    how = "with their own tuning" if peers["tuned"] else "with their heuristics' configs, not tuned"
    lines = [f"Other libraries: {found}, {how}." if found else "No other library was importable."]
    if found and missing:
        lines[0] += f" Not importable here, so not run: {missing}."
    return [*lines, ""]


def to_markdown(record: Record, figures: Sequence[tuple[str, str]] = ()) -> str:
    """`figures` are file names with what they show."""
    run, cases = record["run"], record["cases"]
    headline = headline_of(record)
    on_cpu = run.get("device") == "cpu"
    sm80 = run.get("backend") == "sm80"
    title = "# Grouped products on a CPU" if on_cpu else "# Grouped products on a Hopper GPU"
    lines = [
        title + (", sm80 backend" if sm80 else ""),
        "",
        f"{run['gpu']}, {run['dtype']}, {run['date']}; torch {run['torch']}, CUDA {run['cuda']}, driver "
        f"{run['driver']}. Written by `moegemm-bench`; the JSON file beside this page has the medians "
        "and names the commit that was measured.",
        "",
        f"Round robin of all contenders of a case, medians of {run['rounds']} rounds, caches flushed before each "
        f"launch{', the card under load' if run.get('under_load') else ''} (see `benchmarks/README.md`). "
        "TFLOP/s count useful work only: 2 M N K with M = tokens x topk. *dense* is one product with the same FLOPs, "
        "*torch + copies* is `grouped_mm` with the gather, scatter and multiply that its user adds, "
        "*expert loop* is one product per expert with the same copies.",
        "",
        "fwd1, dx1 and dw1 belong to the first GEMM of a layer (gate and up), fwd2, dx2 and dw2 to the second: fwd1 "
        "gathers X, dx1 scatters dX, dw1 gathers X; fwd2 scatters Y and multiplies by the router's weights, dx2 and "
        "dw2 gather dY.",
        "",
        *(ceiling_lines(cases) if sm80 else ()),
        *peer_lines(run),
        *summary_lines(cases),
        "",
    ]
    for name, what in figures:
        lines += [f"![{what}]({name})", ""]
    lines += [
        f"## {headline} tokens, random routing, TFLOP/s",
        "",
        "Target: TFLOP/s." if sm80 else "Target: share of dense, in brackets times torch.",
        "",
        *headline_table(cases, headline),
        "",
    ]
    if not on_cpu and any(c["tokens"] <= DECODE_TOKENS for c in cases):
        lines += [
            "## Decode, random routing",
            "",
            f"The floor is reading the weights of the touched experts once at {READ_BYTES_PER_S * 1e-12:.1f} TB/s.",
            "",
            *decode_table(cases, record["models"]),
            "",
        ]
    for routing in dict.fromkeys(c["routing"] for c in cases if c["tokens"] != headline or c["routing"] != "random"):
        lines += [
            f"## All token counts, {routing} routing",
            "",
            "TFLOP/s of moegemm, in brackets times torch + copies.",
            "",
            *token_table(cases, routing),
            "",
        ]
    if any(name.startswith("ours ") for c in cases for name in c["contenders"]):
        lines += ["## Where another kernel than the chosen one is faster", "", *kernel_table(cases), ""]
    if record.get("route") or record.get("combine"):
        lines += ["## Routing", "", *pass_lines(record), ""]
    return "\n".join(lines)
