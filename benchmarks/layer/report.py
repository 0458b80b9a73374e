"""The record of the layer benchmark as a page and a picture."""

from pathlib import Path
from typing import Any

from moegemm.bench.pages.plots import save

from layer.contenders import HEADLINE

# Times faster than transformers' grouped_mm, forward and forward + backward: the figures this project set itself.
TARGETS = {
    "qwen3-30b-a3b": (2.7, 2.4),
    "mixtral-8x7b": (1.27, 1.32),
    "deepseek-v3": (1.45, 1.38),
    "qwen3-next-80b-a3b": (2.95, 2.5),
    "gpt-oss-120b": (1.5, 1.47),
    "olmoe": (2.5, 2.15),
}
KEPT_MIB = {"qwen3-30b-a3b": 225, "mixtral-8x7b": 960, "deepseek-v3": 625}
PASSES = ("forward", "forward_backward")
OF_COPY = 0.9

FIRST_CALLS = (
    "Calls are forward + backward, on the host's clock. Only the first model of a run shows what a process pays once. "
    "moegemm's kernels are loaded in the background from the moment the process uses the GPU: here, while the weights "
    "are made and the card is heated. Those of grouped_mm are loaded by its first call."
)


NOT_JUDGED = (
    "**No target is judged here:** this run did not measure router weights in the model's dtype. With "
    "fp32 weights grouped_mm multiplies and permutes its rows in fp32, so these factors are larger than "
    "they would be for the models whose routers hand over bf16 weights (Qwen3, Qwen3-Next, OLMoE, gpt-oss); Mixtral's "
    "and DeepSeek-V3's routers do hand over fp32. gpt-oss's factors also contain the cost of grouped_mm's bias "
    "gradients."
)


def one_of_each(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The headline variant where it was measured, else the first one of each model and token count."""
    chosen: dict[tuple[str, int], dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda e: e["variant"] != HEADLINE):
        chosen.setdefault((entry["model"], entry["tokens"]), entry)
    return list(chosen.values())


def speedup(entry: dict[str, Any], which: str) -> float:
    return entry[which]["grouped_mm"]["ms"] / entry[which]["moegemm"]["ms"]


def _met(value: float, target: float | None) -> str:
    return "" if target is None else "yes" if value >= target else "**no**"


def page(record: dict[str, Any], picture: str) -> str:
    """`picture` is the file name of what draw() leaves beside the page."""
    run, entries = record["run"], record["layers"]
    lines = [
        "# The expert layer against transformers",
        "",
        f"`moegemm.moe_mlp` and transformers' `grouped_mm` experts (transformers {run['transformers']}) on the same "
        "weights and routing, from expert ids and router weights to the combined output. Gradients are those of x, "
        "both weights, the router weights and, for gpt-oss, both biases. "
        f"{run['gpu']}, {run['dtype']}, torch {run['torch']}, {run['date']}, medians of {run['rounds']} rounds in a "
        "round robin.",
        "",
        "The variant says which router weights both get. In the model's dtype is the faster case for grouped_mm; with "
        "fp32 ones it works on fp32 rows. It also says whether gpt-oss goes without its biases, whose gradients cost "
        "grouped_mm a scatter. Only the first variant is held against the targets.",
        "",
        f"![Times faster than transformers' grouped_mm experts]({picture})",
        "",
        "| model | variant | tokens | pass | grouped_mm, ms | moegemm, ms | times faster | target | met |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in entries:
        judged = entry["tokens"] == 8192 and entry["variant"] == HEADLINE
        targets = TARGETS.get(entry["model"], (None, None)) if judged else (None, None)
        for which, target in zip(PASSES, targets, strict=True):
            theirs, ours = entry[which]["grouped_mm"]["ms"], entry[which]["moegemm"]["ms"]
            factor = speedup(entry, which)
            cells = [
                entry["model"], entry["variant"], str(entry["tokens"]), which.replace("_", " + "), f"{theirs:.3f}",
                f"{ours:.3f}", f"{factor:.2f}", "" if target is None else str(target), _met(factor, target),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    if not any(entry["variant"] == HEADLINE for entry in entries):
        lines += ["", NOT_JUDGED]
    lines += ["", "## Memory kept for the backward, and the first call", ""]
    lines += [
        "| model | kept, grouped_mm, MiB | kept, moegemm, MiB | at most | met | grouped_mm, first / second call, ms | "
        "moegemm, first / second call, ms | within 2x |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for entry in one_of_each(entries):
        if "kept_mib" not in entry:
            continue
        most = KEPT_MIB.get(entry["model"])
        kept, (first, second) = entry["kept_mib"], entry["first_calls_ms"]["moegemm"]
        theirs = " / ".join(f"{ms:.1f}" for ms in entry["first_calls_ms"]["grouped_mm"])
        met = "" if most is None else "yes" if kept["moegemm"] <= most + 1 else "**no**"
        lines.append(
            f"| {entry['model']} | {kept['grouped_mm']:.0f} | {kept['moegemm']:.0f} | {most or ''} | {met} | "
            f"{theirs} | {first:.1f} / {second:.1f} | {'yes' if first <= 2 * second else '**no**'} |"
        )
    lines += ["", FIRST_CALLS, ""]
    lines += ["## The passes over rows", ""]
    lines += ["Bytes read and written, against a copy of as many in the same round robin; the target is 0.90.", ""]
    lines += ["| model | pass | MB | ms | GB/s | of a copy | met |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for entry in one_of_each(entries):
        for row in entry.get("passes", ()):
            share = row["copy_ms"] / row["ms"]
            lines.append(
                f"| {entry['model']} | {row['pass']} | {row['bytes'] / 1e6:.0f} | {row['ms']:.3f} | "
                f"{row['bytes'] / row['ms'] / 1e6:.0f} | {share:.2f} | {_met(share, OF_COPY)} |"
            )
    worst = max(max(entry["disagreement"].values()) for entry in entries)
    lines += ["", f"Outputs and gradients of the two differ by at most {worst:.1e} in the norm.", ""]
    return "\n".join(lines)


def draw(record: dict[str, Any], folder: Path, stem: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(entry["tokens"] for entry in record["layers"])
    entries = [e for e in one_of_each(record["layers"]) if e["tokens"] == most]
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    with pyplot.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
        places = range(len(entries))
        for offset, which, color in ((-0.2, "forward", "#1f6feb"), (0.2, "forward_backward", "#7aa7f0")):
            factors = [speedup(entry, which) for entry in entries]
            bars = axis.bar([p + offset for p in places], factors, 0.38, color=color, label=which.replace("_", " + "))
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
            judged = {e["model"] for e in entries if e["variant"] == HEADLINE} & TARGETS.keys()
            targets = [TARGETS[e["model"]][which != "forward"] if e["model"] in judged else None for e in entries]
            marks = [(p + offset, t) for p, t in zip(places, targets, strict=True) if t is not None]
            if marks:
                label = "target" if which == "forward" else None
                axis.scatter(*zip(*marks, strict=True), marker="_", s=260, color="#24292f", zorder=3, label=label)
        axis.axhline(1.0, color="#b9c0c9", linewidth=1)
        axis.set_xticks(list(places), [entry["model"] for entry in entries])
        axis.set_ylabel("times faster than grouped_mm")
        run = record["run"]
        title = f"Expert layer, {entries[0]['tokens']} tokens, {run['dtype']}, {entries[0]['variant']}, {run['gpu']}"
        axis.set_title(title, loc="left", fontweight="bold", fontsize=9)
        figure.legend(loc="outside lower center", frameon=False, ncols=3)
        save(figure, folder / f"{stem}.png")
        pyplot.close(figure)
