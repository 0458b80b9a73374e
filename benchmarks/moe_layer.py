#!/usr/bin/env python3
"""Times the whole expert layer against transformers' grouped_mm experts, and writes the record.

python benchmarks/moe_layer.py                      # on the GPU, the six models of the figures
python benchmarks/moe_layer.py --device cpu --tokens 64 --models demo --out /tmp
"""

import argparse
import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from layer.contenders import FP32_WEIGHTS, GPT_OSS, HEADLINE, NO_BIASES  # noqa: E402
from layer.measure import measure  # noqa: E402 - found through the line above
from layer.report import TARGETS, draw, page, speedup  # noqa: E402
from moegemm.bench.cases import read_catalogue  # noqa: E402
from moegemm.bench.measure import DTYPES  # noqa: E402
from moegemm.bench.program import (  # noqa: E402
    add_device_option,
    layer_parser,
    measure_each,
    number,
    render_or_measure,
    started,
)

STEM = "moe_layer"


def arguments() -> argparse.Namespace:
    parser = layer_parser(__doc__, list(TARGETS), 20, "layer")
    add_device_option(parser)
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--tokens", nargs="+", type=number, default=[8192], help="default: %(default)s")
    parser.add_argument("--variants", action="store_true", help="also fp32 router weights, and gpt-oss without biases")
    return parser.parse_args()


def show(record: dict, folder: Path) -> None:
    (folder / f"{STEM}.md").write_text(page(record, f"{STEM}.png"))
    draw(record, folder, STEM)


def measure_all(options: argparse.Namespace) -> dict:
    record, clock = started(options, options.device, options.dtype, transformers=transformers.__version__)
    variants = [(name, tokens, HEADLINE) for name in options.models for tokens in options.tokens]
    if options.variants:
        variants += [(name, options.tokens[0], FP32_WEIGHTS) for name in options.models]
        variants += [(name, options.tokens[0], NO_BIASES) for name in options.models if name in GPT_OSS]
    catalogue, how = read_catalogue(), (DTYPES[options.dtype], options.device, options.rounds, clock)
    cases = [(catalogue[name], tokens, variant, *how) for name, tokens, variant in variants]
    measure_each(options, STEM, record, cases, measure, words_of, "layers")
    return record


def words_of(entry: dict) -> str:
    factors = " / ".join(f"{speedup(entry, which):.2f}" for which in ("forward", "forward_backward"))
    return f"{entry['model']}, {entry['variant']}, {entry['tokens']} tokens: {factors} times faster"


def main() -> None:
    render_or_measure(arguments(), STEM, show, measure_all)


if __name__ == "__main__":
    main()
