"""Trains LoRA adapters beside experts in MXFP4 with the sizes of published models, one after the other in one process,
and records memory and time: examples/finetune_quantized.py does the work.

    python benchmarks/finetune_quantised.py                              # gpt-oss-20b and gpt-oss-120b sizes on a GPU
    python benchmarks/finetune_quantised.py --sizes tiny --steps 5 --out /tmp/record
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("python", "examples")]

import finetune_quantized as example  # noqa: E402 - found through the line above, as what follows
from moegemm.bench.machine import commit_of, describe  # noqa: E402
from moegemm.bench.program import add_record_options, render_or_measure  # noqa: E402
from moegemm.bench.record import write_json  # noqa: E402

STEM = "finetune"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="gpt-oss-20b,gpt-oss-120b", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: the example's")
    add_record_options(parser, "quantised")
    return parser.parse_args()


def measure_one(sizes: str, steps: int | None) -> dict[str, Any]:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    options = example.arguments(["--sizes", sizes, *(["--steps", str(steps)] if steps else [])])
    done = example.run(options)
    shape = {name: getattr(options, name) for name in ("sizes", "tokens", "length", "rank", "steps")}
    found = {"experts_gb": done.experts_gb, "trained": done.trained, "step_ms": done.step_ms, "peak_gb": done.peak_gb}
    layers = example.SIZES[sizes]["num_hidden_layers"]
    return shape | {"layers": layers} | found | {"first_loss": done.losses[0], "last_loss": done.losses[-1]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = describe(device, "bf16", 1, options.commit or commit_of(ROOT))
    run |= {"transformers": example.transformers.__version__, "peft": example.peft.__version__}
    record: dict[str, Any] = {"run": run, "cases": []}
    for sizes in options.sizes.split(","):
        record["cases"].append(measure_one(sizes, options.steps))
        write_json(record, options.out, STEM)
    print(page(record))
    return record


def page(record: dict[str, Any]) -> str:
    run = record["run"]
    with_what = f"torch {run['torch']}, transformers {run['transformers']}, PEFT {run['peft']}"
    lines = [
        "# LoRA beside experts in MXFP4",
        "",
        f"One {run['gpu']}, {with_what}, {run['date']}.",
        "Models of transformers with random weights: experts in MXFP4, everything else and the adapters (experts,",
        "attention) in bf16, AdamW, gradient checkpointing, logits of 256 tokens at a time. A step is forward,",
        "backward and update, the median without the first. GB are 1e9 bytes; the peak is what torch's allocator had",
        "in use.",
        "",
        "| sizes of | layers | experts, packed | rank | tokens a step | trained parameters | peak | step | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for case in record["cases"]:
        cells = [
            case["sizes"],
            case["layers"],
            f"{case['experts_gb']:.2f} GB",
            case["rank"],
            f"{case['tokens']} in sequences of {case['length']}",
            f"{case['trained'] / 1e6:.1f} million",
            f"{case['peak_gb']:.2f} GB",
            f"{case['step_ms']:.0f} ms",
            f"{case['first_loss']:.2f} to {case['last_loss']:.2f} in {case['steps']} steps",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


def show(record: dict[str, Any], folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record))


if __name__ == "__main__":
    render_or_measure(parse_options(), STEM, show, measure)
