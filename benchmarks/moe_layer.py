#!/usr/bin/env python3
"""Times the whole expert layer against transformers' grouped_mm experts, and writes the record.

PYTHONPATH=python python benchmarks/moe_layer.py                      # on the GPU, the six models of the figures
PYTHONPATH=python python benchmarks/moe_layer.py --device cpu --tokens 64 --models demo --out /tmp
"""

import argparse
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from layer.contenders import FP32_WEIGHTS, GPT_OSS, HEADLINE, NO_BIASES  # noqa: E402
from layer.measure import measure  # noqa: E402 - found through the line above
from layer.report import TARGETS, draw, page, speedup  # noqa: E402
from moegemm.bench.cases import read_catalogue  # noqa: E402
from moegemm.bench.machine import commit_of, describe  # noqa: E402
from moegemm.bench.measure import DTYPES  # noqa: E402
from moegemm.bench.record import layer_parser, read_to_render, write_json  # noqa: E402
from moegemm.bench.timing import Clock  # noqa: E402

STEM = "moe_layer"


def arguments() -> argparse.Namespace:
    parser = layer_parser(__doc__, list(TARGETS), 20, ROOT / "build" / "bench" / "layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="default: %(default)s")
    parser.add_argument("--variants", action="store_true", help="also fp32 router weights, and gpt-oss without biases")
    return parser.parse_args()


def show(record: dict, folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record, f"{STEM}.png"))
    draw(record, folder, STEM)


def main() -> None:
    catalogue = read_catalogue()
    options = arguments()
    if options.render:
        show(read_to_render(options.render, options.out, STEM), options.out)
        return
    clock = Clock(options.device)
    run = describe(options.device, options.dtype, options.rounds, options.commit or commit_of(ROOT))
    record = {"run": {**run, "transformers": transformers.__version__}, "layers": []}
    cases = [(catalogue[name], tokens, HEADLINE) for name in options.models for tokens in options.tokens]
    if options.variants:
        cases += [(catalogue[name], options.tokens[0], FP32_WEIGHTS) for name in options.models]
        cases += [(catalogue[name], options.tokens[0], NO_BIASES) for name in options.models if name in GPT_OSS]
    clock.heat(options.heat)
    for done, (model, tokens, variant) in enumerate(cases, start=1):
        entry = measure(model, tokens, variant, DTYPES[options.dtype], options.device, options.rounds, clock)
        record["layers"].append(entry)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        factors = " / ".join(f"{speedup(entry, which):.2f}" for which in ("forward", "forward_backward"))
        print(
            f"[{done}/{len(cases)}] {model.name}, {variant}, {tokens} tokens: {factors} times faster",
            file=sys.stderr,
        )
        write_json(record, options.out, STEM)  # after each model: a run that is cut short leaves what it has
    show(record, options.out)


if __name__ == "__main__":
    main()
