"""The record as a picture: one panel per model, one pair of bars per product, the dense ceiling above them."""

from pathlib import Path

from grouped.cases import HEADLINE_TOKENS, OPS
from grouped.report import Record, tflops

TORCH_COLOR, OURS_COLOR, DENSE_COLOR = "#b9c0c9", "#1f6feb", "#24292f"
COLUMNS = 3


def draw(record: Record, folder: Path, stem: str) -> list[Path]:
    """Writes a PNG and an SVG, or nothing where nothing was measured at the headline size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = {
        (c["model"], c["op"]): c
        for c in record["cases"]
        if c["tokens"] == HEADLINE_TOKENS and c["routing"] == "random" and c["contenders"]
    }
    models = list(dict.fromkeys(model for model, _ in cases))
    if not models:
        return []
    lines = -(-len(models) // COLUMNS)
    columns = min(COLUMNS, len(models))
    # 9 inches at 100 dots: the width of a README column, so that 8 points stay 8 points there.
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": stem}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(9, 0.75 + 2.0 * lines), sharey=True, squeeze=False, layout="constrained"
        )
        for panel, axis in enumerate(axes.flat):
            if panel >= len(models):
                axis.set_visible(False)
                continue
            _draw_model(axis, cases, models[panel], record)
            if panel % columns == 0:
                axis.set_ylabel("TFLOP/s")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=3, frameon=False)
        run = record["run"]
        title = f"{HEADLINE_TOKENS} tokens, random routing, {run['dtype']}, {run['gpu']}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=9, fontweight="bold")
        paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
        figure.savefig(paths[0], dpi=200)
        figure.savefig(paths[1], metadata={"Date": None})
        pyplot.close(figure)
    return paths


def _draw_model(axis, cases, model: str, record: Record) -> None:
    ops = [op for op in OPS if (model, op) in cases]
    places = range(len(ops))

    def rates(name: str) -> list[float]:
        return [tflops(cases[model, op], name) or 0.0 for op in ops]

    width = 0.38
    axis.bar([p - width / 2 for p in places], rates("torch"), width, color=TORCH_COLOR, label="torch + copies")
    bars = axis.bar([p + width / 2 for p in places], rates("ours"), width, color=OURS_COLOR, label="moegemm")
    for i, (place, rate) in enumerate(zip(places, rates("dense"), strict=True)):
        if rate:
            label = "dense cuBLAS (ceiling)" if i == 0 else None
            axis.hlines(rate, place - 0.45, place + 0.45, color=DENSE_COLOR, linewidth=1.4, label=label)
    axis.bar_label(
        bars,
        labels=[f"{rate:.0f}" if rate else "" for rate in rates("ours")],
        label_type="center",
        color="white",
        rotation=90,
        fontsize=7,
    )
    axis.set_xticks(list(places), ops)
    axis.tick_params(axis="x", length=0)
    axis.grid(axis="y", linewidth=0.4, color="#d0d7de")
    axis.set_axisbelow(True)
    sizes = record["models"][model]
    axis.set_title(
        f"{model}  (E={sizes['experts']}, topk={sizes['topk']})", fontsize=8, loc="left"
    )  # fmt: skip
