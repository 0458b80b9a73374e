"""The roofline of a record: how close each product comes to what memory and one dense product allow."""

from typing import Any

from moegemm.bench.cases import Model
from moegemm.bench.pages import plots
from moegemm.bench.pages.report import LABELS, Entry, Record, tflops
from moegemm.bench.record import element_bytes_of

OPS_SHOWN = {"forward": ("fwd1", "fwd2"), "dX": ("dx1", "dx2"), "dW": ("dw1", "dw2")}


def traffic_bytes(case: Entry, model: Model, element_bytes: int) -> float:
    """What must cross memory at least once: weights of the experts in use, rows, and the result. Tokens that a first
    product gathers are read once, however many experts they have."""
    _, n, k = model.weight_shape(case["op"])
    rows = case["rows"]
    x_rows = case["tokens"] if case["op"].endswith("1") else rows
    weights = case["touched_experts"] * n * k
    elements = {
        "fwd": weights + x_rows * k + rows * n,
        "dx": weights + rows * n + rows * k,
        "dw": model.experts * n * k + x_rows * k + rows * n,
    }[case["op"][:-1]]
    return float(elements * element_bytes)


def intensity(case: Entry, model: Model, element_bytes: int) -> float:
    """FLOP per byte."""
    return float(case["flops"]) / traffic_bytes(case, model, element_bytes)


def draw_roofline(pyplot: Any, record: Record) -> Any:
    """A panel for each of forward, dX and dW: every case that ran, ours and torch's, under the roof."""
    cases = [c for c in plots.random_cases(record) if c.get("touched_experts") and tflops(c, "ours")]
    shown = [(name, ops) for name, ops in OPS_SHOWN.items() if any(c["op"] in ops for c in cases)]
    if len({c["tokens"] for c in cases}) < 2:  # one batch size is one place under the roof
        return None
    models = {name: Model(**sizes) for name, sizes in record["models"].items()}
    element_bytes = element_bytes_of(record["run"])
    bytes_per_s = plots.bytes_per_s_of(record)
    peak = max(rate for c in cases for who in ("dense", "ours") if (rate := tflops(c, who)))
    places = [intensity(c, models[c["model"]], element_bytes) for c in cases]
    ends = min(places), max(*places, 2 * peak * 1e12 / bytes_per_s)
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(plots.WIDTH_INCHES, 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (name, ops) in zip(axes[0], shown, strict=True):
        _draw_cases(axis, [c for c in cases if c["op"] in ops], models, element_bytes)
        corner = peak * 1e12 / bytes_per_s
        roof = [ends[0] * bytes_per_s * 1e-12, peak, peak]
        axis.plot([ends[0], corner, ends[1]], roof, color=plots.ROOF_COLOR, lw=1.2, zorder=1)
        plots.log_axes(axis)
        axis.set_title(name, fontsize=8, loc="left")
        axis.set_xlabel("FLOP per byte of memory traffic")
    axes[0][0].set_ylabel("TFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    handles += [pyplot.Line2D([], [], color=plots.ROOF_COLOR, lw=1.2)]
    labels += [f"roof: {bytes_per_s * 1e-9:,.0f} GB/s of a copy, {peak:.3g} TFLOP/s of the fastest product"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    plots.set_title(figure, record, "Roofline")
    return figure


def _draw_cases(axis: Any, cases: list[Entry], models: dict[str, Model], element_bytes: int) -> None:
    torch_style = ("torch", plots.RIVAL_COLORS[0], LABELS["torch"])
    for who, color, label in (torch_style, ("ours", plots.OURS_COLOR, "moegemm")):
        points = [(intensity(c, models[c["model"]], element_bytes), rate) for c in cases if (rate := tflops(c, who))]
        if points:
            axis.plot(*zip(*points, strict=True), "o", ms=3, mew=0, color=color, label=label)
