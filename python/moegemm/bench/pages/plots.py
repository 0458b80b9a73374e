"""The record as pictures: bars per model and product under the dense ceiling, speed over rows per expert and over FLOP
per byte (roofline.py) under the roofline, and the memory bandwidth of decoding. Drawn for the width of a README
column."""

import io
from pathlib import Path
from typing import Any

from moegemm.bench.cases import DECODE_TOKENS, OPS
from moegemm.bench.pages.report import LABELS, Entry, Record, headline_of, milliseconds, rivals, tflops
from moegemm.bench.pages.targets import READ_BYTES_PER_S
from moegemm.bench.record import element_bytes_of

OURS_COLOR, DENSE_COLOR, ROOF_COLOR = "#1f6feb", "#24292f", "#57606a"
RIVAL_COLORS = ("#b9c0c9", "#e3b341", "#a371f7", "#f0883e", "#3fb950", "#db61a2", "#8c6d46")
MODEL_COLORS = ("#1f6feb", "#d29922", "#2da44e", "#cf222e", "#8250df", "#0a7ea4", "#bf3989", "#57606a")
COLUMNS = 3
# 9 inches at 100 dots: the width of a README column, so that 8 points stay 8 points there. Half as many dots again
# for sharp letters on dense screens.
WIDTH_INCHES = 9
DOTS_PER_INCH = 150
# Bars and lines have a dozen colours, their edges shades of these: a palette makes the file a third of the size.
COLORS = 64
STYLE: dict[Any, Any] = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def draw(record: Record, folder: Path, stem: str) -> list[tuple[Path, str]]:
    """Writes the pictures for which something was measured; their paths with what they show."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from moegemm.bench.pages.roofline import draw_roofline  # which takes colours and axes from here

    drawn: list[tuple[Path, str]] = []
    headline = headline_of(record)
    for suffix, make, what in (
        ("", _bars, f"TFLOP/s by model and product, {headline} tokens"),
        ("-tokens", _over_rows, "TFLOP/s over rows per expert, with the roofline"),
        ("-roofline", draw_roofline, "Every product under the roofline"),
        ("-decode", _decode, "Bandwidth of decoding"),
    ):
        with pyplot.rc_context(STYLE):
            figure = make(pyplot, record)
            if figure is None:
                continue
            path = folder / f"{stem}{suffix}.png"
            save(figure, path)
            pyplot.close(figure)
            drawn.append((path, what))
    return drawn


def save(figure: Any, path: Path) -> None:
    """A PNG with a palette."""
    from PIL import Image  # comes with matplotlib

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS_PER_INCH)
    with Image.open(drawn) as image:
        palette = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    palette.save(path, "PNG", optimize=True)


def set_title(figure: Any, record: Record, what: str) -> None:
    run = record["run"]
    text = f"{what}, random routing, {run['dtype']}, {run['gpu']}"
    figure.suptitle(text, x=0.01, ha="left", fontsize=9, fontweight="bold")


def log_axes(axis: Any) -> None:
    """Both logarithmic, with plain numbers and a grid."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_formatter(lambda value, _: f"{value:g}")
    axis.grid(which="major", linewidth=0.4, color="#d0d7de")


def bytes_per_s_of(record: Record) -> float:
    """What memory gave while the record was measured."""
    return float(record["run"].get("memory_bytes_per_s", READ_BYTES_PER_S))


def random_cases(record: Record) -> list[Entry]:
    return [c for c in record["cases"] if c["routing"] == "random" and c["contenders"] and not c.get("skipped")]


def _bars(pyplot: Any, record: Record) -> Any:
    headline = headline_of(record)
    cases = {(c["model"], c["op"]): c for c in random_cases(record) if c["tokens"] == headline}
    models = list(dict.fromkeys(model for model, _ in cases))
    if not models:
        return None
    lines, columns = -(-len(models) // COLUMNS), min(COLUMNS, len(models))
    size = (WIDTH_INCHES, 0.85 + 2.0 * lines)
    figure, axes = pyplot.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    others = [name for name in rivals(cases.values()) if name != "dense"]
    for panel, axis in enumerate(axes.flat):
        if panel >= len(models):
            axis.set_visible(False)
            continue
        _draw_model(axis, cases, models[panel], record, others)
        if panel % columns == 0:
            axis.set_ylabel("TFLOP/s")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    set_title(figure, record, f"{headline} tokens")
    return figure


def _draw_model(axis: Any, cases: dict[tuple[str, str], Entry], model: str, record: Record, others: list[str]) -> None:
    ops = [op for op in OPS if (model, op) in cases]
    places = range(len(ops))

    def rates(name: str) -> list[float]:
        return [tflops(cases[model, op], name) or 0.0 for op in ops]

    names = [*others, "ours"]
    width = 0.8 / len(names)
    colors = dict(zip(others, RIVAL_COLORS, strict=False)) | {"ours": OURS_COLOR}
    for i, name in enumerate(names):
        left = [place - 0.4 + (i + 0.5) * width for place in places]
        label = "moegemm" if name == "ours" else LABELS.get(name, name)
        bars = axis.bar(left, rates(name), width, color=colors.get(name, "#b9c0c9"), label=label)
    numbers = [f"{rate:.3g}" if rate else "" for rate in rates("ours")]
    for text in axis.bar_label(bars, numbers, label_type="center", color="white", rotation=90, fontsize=7):
        text.set(rotation_mode="anchor", verticalalignment="center_baseline")  # digits alone are centred, no descenders
    for i, (place, rate) in enumerate(zip(places, rates("dense"), strict=True)):
        if rate:
            ceiling = "dense product (ceiling)" if i == 0 else None
            axis.hlines(rate, place - 0.45, place + 0.45, color=DENSE_COLOR, linewidth=1.4, label=ceiling)
    axis.set_xticks(list(places), ops)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y", linewidth=0.4, color="#d0d7de")
    sizes = record["models"][model]
    axis.set_title(f"{model}  (E={sizes['experts']}, topk={sizes['topk']})", fontsize=8, loc="left")


def _over_rows(pyplot: Any, record: Record) -> Any:
    """Both axes logarithmic; the roof is the same for every model: one row of an expert brings as many operations as
    its weights have bytes."""
    cases = [c for c in random_cases(record) if c.get("touched_experts") and c["op"] in ("fwd1", "fwd2")]
    if len({c["tokens"] for c in cases}) < 3:  # two points are no curve
        return None
    models = list(dict.fromkeys(c["model"] for c in cases))
    bytes_per_s = bytes_per_s_of(record)
    peak = max(rate for c in cases if (rate := tflops(c, "dense") or tflops(c, "ours")))
    element_bytes = element_bytes_of(record["run"])
    size = (WIDTH_INCHES, 3.6)
    figure, axes = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for axis, op in zip(axes, ("fwd1", "fwd2"), strict=True):
        xs = sorted({c["rows"] / c["touched_experts"] for c in cases if c["op"] == op})
        if not xs:
            continue
        for i, model in enumerate(models):
            mine = sorted((c for c in cases if c["op"] == op and c["model"] == model), key=lambda c: int(c["tokens"]))
            rows = [c["rows"] / c["touched_experts"] for c in mine]
            color = MODEL_COLORS[i % len(MODEL_COLORS)]
            axis.plot(rows, [tflops(c, "ours") for c in mine], "o-", ms=3, lw=1.3, color=color, label=model)
            axis.plot(rows, [tflops(c, "torch") for c in mine], ":", lw=1, color=color)
        roof_x = [xs[0] * (xs[-1] / xs[0]) ** (i / 100) for i in range(101)]
        roof = [min(peak, x * 2 / element_bytes * bytes_per_s * 1e-12) for x in roof_x]
        axis.plot(roof_x, roof, color=ROOF_COLOR, lw=1.2, zorder=1)
        middle = roof_x[45]
        axis.annotate(
            "reading the weights once", (middle, min(peak, middle * 2 / element_bytes * bytes_per_s * 1e-12)),
            xytext=(-6, 8), textcoords="offset points", ha="right", fontsize=7, color=ROOF_COLOR,
        )  # fmt: skip
        axis.annotate(
            "dense product", (roof_x[-1], peak), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=7,
            color=ROOF_COLOR,
        )  # fmt: skip
        log_axes(axis)
        axis.set_title(op, fontsize=8, loc="left")
        axis.set_xlabel("rows per expert that has any")
    axes[0].set_ylabel("TFLOP/s")
    handles, labels = axes[0].get_legend_handles_labels()
    handles.append(pyplot.Line2D([], [], ls=":", color="#57606a", lw=1))
    figure.legend(handles, [*labels, "torch + copies"], loc="outside lower center", ncols=4, frameon=False)
    set_title(figure, record, "Forward products")
    return figure


def _decode(pyplot: Any, record: Record) -> Any:
    """Bytes of the touched experts' weights per second: decoding can be no faster than memory."""
    cases = {
        (c["op"], c["model"], c["tokens"]): c
        for c in random_cases(record)
        if c["tokens"] <= DECODE_TOKENS and c["op"] in ("fwd1", "fwd2") and c.get("weight_bytes")
    }
    models = list(dict.fromkeys(model for _, model, _ in cases))
    if not models:
        return None
    counts = sorted({count for _, _, count in cases})
    bytes_per_s = bytes_per_s_of(record)
    unit, name = (1e-12, "TB/s") if bytes_per_s > 1e12 else (1e-9, "GB/s")
    size = (WIDTH_INCHES, 4.2)
    figure, axes = pyplot.subplots(2, 1, figsize=size, sharex=True, sharey=True, layout="constrained")
    for axis, op in zip(axes, ("fwd1", "fwd2"), strict=True):
        width = 0.8 / len(counts)
        for i, count in enumerate(counts):
            for place, model in enumerate(models):
                case = cases.get((op, model, count))
                if case is None:
                    continue
                centre = place - 0.4 + (i + 0.5) * width
                shade = 0.45 + 0.55 * (i + 1) / len(counts)
                for rival, color, part in (("torch", "#b9c0c9", -0.24), ("ours", OURS_COLOR, 0.24)):
                    ms = milliseconds(case, rival)
                    rate = 0.0 if ms is None else case["weight_bytes"] / ms * 1e3 * unit
                    axis.bar(centre + part * width, rate, 0.46 * width, color=color, alpha=shade)
                axis.annotate(
                    f"{count}", (centre, 0), xytext=(0, -9), textcoords="offset points", ha="center", fontsize=6.5
                )
        axis.axhline(bytes_per_s * unit, color=DENSE_COLOR, linewidth=1.2)
        axis.set_ylabel(name)
        axis.set_title(f"{op}: weights read per second; below the bars the tokens", fontsize=8, loc="left")
        axis.set_xticks(range(len(models)), models)
        axis.tick_params(axis="x", length=0, pad=13)
        axis.grid(axis="y", linewidth=0.4, color="#d0d7de")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in ("#b9c0c9", OURS_COLOR)]
    line = pyplot.Line2D([], [], color=DENSE_COLOR, lw=1.2)
    figure.legend(
        [*patches, line],
        ["torch + copies", "moegemm", "a copy in memory (reads alone are a little faster)"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    set_title(figure, record, "Decoding")
    return figure
