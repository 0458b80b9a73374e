"""Products with quantised weights beside bf16: dequantised in the product, before it, or never quantised.

| contender | what is timed |
|---|---|
| bf16 | the product with weights that were never quantised |
| a format | the product that reads the packed weights |
| its name + dequantise | `dequantize()` to bf16 and then the product: what a library without such kernels does |
"""

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.bench.cases import DECODE_TOKENS, Model
from moegemm.bench.timing import Clock, spread
from moegemm.interface import grouped_gemm_dX, grouped_gemm_forward
from moegemm.quantized.weight import QuantizedWeight
from moegemm.routing import route

MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3", "mixtral-8x7b")
TOKENS = (8192, 2048, 512, 64, 16, 1)
FEW_TOKENS_OF = MODELS[:2]  # where nobody names a number of tokens; the others are large
CPU_TOKENS = (2048, 16)
FORMATS = ("mxfp4", "fp8/128x128", "fp8/channel", "int4/32", "nf4/64")
OPS = ("fwd1", "fwd2", "dx1", "dx2")
IN_ORDER = " in order"  # a first product whose rows are not permuted: measured too where tokens are many
MANY_TOKENS = 8192
PLAIN = "bf16"
AND_DEQUANTISE = " + dequantise"


def random_weight(word: str, experts: int, n: int, k: int, device: str) -> QuantizedWeight:
    """Random bytes with scales of ordinary weights, made where they are used."""
    name, _, block = word.partition("/")

    def numbers(shape: tuple[int, ...], dtype: torch.dtype, low: int, high: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).random_(low, high)

    def factors(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, device=device).uniform_(0.005, 0.02).to(dtype)

    if name == "mxfp4":
        scales = numbers((experts, n, k // 32), torch.uint8, 118, 121)
        return QuantizedWeight(numbers((experts, n, k // 2), torch.uint8, 0, 256), scales, word)
    if name == "int4":
        packed = numbers((experts, n, k // 2), torch.uint8, 0, 256).view(torch.int32)
        return QuantizedWeight(packed, factors((experts, n, k // int(block)), torch.bfloat16), word)
    if name == "nf4":
        absmax = factors((experts, -(-n * k // int(block))), torch.float32)
        return QuantizedWeight(numbers((experts, n, k // 2), torch.uint8, 0, 256), absmax, word)
    exponents = numbers((experts, n, k), torch.uint8, 0, 112)  # finite values of both signs, up to 16
    values = exponents.bitwise_or_(numbers((experts, n, k), torch.uint8, 0, 2) << 7).view(torch.float8_e4m3fn)
    shapes = {"tensor": (experts,), "channel": (experts, n), "128x128": (experts, -(-n // 128), -(-k // 128))}
    return QuantizedWeight(values, factors(shapes[block], torch.float32), word)


class Layer(NamedTuple):
    """The rows of one case."""

    model: Model
    tokens: int
    m_sizes: Tensor
    gather: Tensor
    x: Tensor  # [T, H]
    inner: Tensor  # [M, I]
    d_pre: Tensor  # [M, 2 I]
    d_rows: Tensor  # [M, H]

    def call(self, op: str, w: Tensor | QuantizedWeight) -> Tensor:
        """One product of the layer, with its gather or scatter unless its rows are in order."""
        topk, routing = self.model.topk, (self.m_sizes, self.gather)
        if op == "fwd1" + IN_ORDER:
            return grouped_gemm_forward(self.d_rows, w, topk, *routing)
        if op == "dx1" + IN_ORDER:
            return grouped_gemm_dX(self.d_pre, w, self.gather, self.m_sizes, topk)
        if op == "fwd1":
            return grouped_gemm_forward(self.x, w, topk, *routing, permute_x=True)
        if op == "fwd2":
            return grouped_gemm_forward(self.inner, w, topk, *routing, permute_y=True)
        if op == "dx1":
            return grouped_gemm_dX(self.d_pre, w, self.gather, self.m_sizes, topk, permute_x=True)
        return grouped_gemm_dX(self.d_rows, w, self.gather, self.m_sizes, topk, permute_y=True)

    def flops(self) -> dict[str, float]:
        m = self.model
        one = 2.0 * self.tokens * m.topk * m.hidden * m.intermediate
        first = dict.fromkeys(("fwd1", "dx1", "fwd1" + IN_ORDER, "dx1" + IN_ORDER), 2 * one)
        return first | {"fwd2": one, "dx2": one}


def rows_of(model: Model, tokens: int, device: str) -> Layer:
    torch.manual_seed(0)
    _, ids = torch.randn(tokens, model.experts, device=device).topk(model.topk)
    m_sizes, gather = route(ids, model.experts)
    rows = tokens * model.topk

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    sizes = (model.intermediate, 2 * model.intermediate, model.hidden)
    return Layer(model, tokens, m_sizes, gather, numbers(tokens, model.hidden), *(numbers(rows, n) for n in sizes))


def _shape(model: Model, op: str) -> tuple[int, int]:
    """N and K of the weights."""
    return (2 * model.intermediate, model.hidden) if "1" in op else (model.hidden, model.intermediate)


def _contenders(layer: Layer, op: str, weights: dict[str, Any]) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for name, w in weights.items():
        calls[name] = lambda w=w: layer.call(op, w)  # type: ignore[misc]
        if name != PLAIN:
            calls[name + AND_DEQUANTISE] = lambda w=w: layer.call(op, w.dequantize())  # type: ignore[misc]
    return calls


def _same_bits(layer: Layer, op: str, w: QuantizedWeight) -> bool:
    return torch.equal(layer.call(op, w), layer.call(op, w.dequantize()))


def measure_case(layer: Layer, op: str, weights: dict[str, Any], clock: Clock, rounds: int) -> dict[str, Any]:
    times = clock.round_robin(_contenders(layer, op, weights), rounds, layer.flops()[op])
    same = {name: _same_bits(layer, op, w) for name, w in weights.items() if name != PLAIN}
    entry = {"model": layer.model.name, "tokens": layer.tokens, "op": op, "tflop": layer.flops()[op] / 1e12}
    return entry | {"contenders": {name: spread(found) for name, found in times.items()}, "same_bits": same}


def cases_of(models: Sequence[Model], tokens: Sequence[int] | None, ops: Sequence[str]) -> list[tuple[Model, int, str]]:
    """Those of the same weights one after the other. No gradients of few tokens, which nobody trains on."""
    cases = []
    for model in models:
        counts = tokens or (TOKENS if model.name in FEW_TOKENS_OF else TOKENS[:1])
        for op in sorted(ops, key=lambda op: op[-1]):
            for count in dict.fromkeys(counts):
                if op.startswith("fwd") or count > DECODE_TOKENS:
                    cases.append((model, count, op))
                if "1" in op and count >= MANY_TOKENS:
                    cases.append((model, count, op + IN_ORDER))
    return cases


def measure(
    cases: Sequence[tuple[Model, int, str]], formats: Sequence[str], device: str, rounds: int, clock: Clock,
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """One entry for each model, number of tokens and product."""
    made: tuple[str, int, int] | None = None
    weights: dict[str, Any] = {}
    for model, tokens, op in cases:
        n, k = _shape(model, op)
        if made != (model.name, n, k):
            weights.clear()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            made = model.name, n, k
            plain = torch.empty((model.experts, n, k), dtype=torch.bfloat16, device=device).normal_(std=k**-0.5)
            weights = {PLAIN: plain} | {word: random_weight(word, model.experts, n, k, device) for word in formats}
            del plain
        try:
            keep(measure_case(rows_of(model, tokens, device), op, weights, clock, rounds))
        except torch.OutOfMemoryError:
            print(f"{model.name}, {tokens} tokens, {op}: does not fit into memory", file=sys.stderr)


def formats_in(record: dict[str, Any]) -> list[str]:
    found = dict.fromkeys(name for entry in record["cases"] for name in entry["same_bits"])
    return list(found)


def words_of(entry: dict[str, Any]) -> str:
    """What a case has come to, in a line."""
    found = entry["contenders"]
    ratios = [f"{name} {found[PLAIN]['ms'] / found[name]['ms']:.2f}x" for name in entry["same_bits"]]
    return f"{entry['model']} T={entry['tokens']} {entry['op']}: bf16 {found[PLAIN]['ms']:.3f} ms, {', '.join(ratios)}"


def _cell(entry: dict[str, Any], name: str) -> str:
    found = entry["contenders"]
    if name not in found:
        return ""
    own, plain, before = (found[which]["ms"] for which in (name, PLAIN, name + AND_DEQUANTISE))
    wrong = "" if entry["same_bits"][name] else " **other bits**"
    return f"{own:.3f} ({plain / own:.2f}x, {before / own:.2f}x){wrong}"


def to_markdown(record: dict[str, Any]) -> str:
    run, formats = record["run"], formats_in(record)
    lines = [
        "# Quantised weights",
        "",
        f"{run['gpu']}, bf16 activations, torch {run['torch']}, {run['date']}.",
        f"{run['rounds']} rounds, in which all contenders take turns. The products of an expert layer of each model's",
        "sizes, random routing, gather and scatter inside except where rows are in order. Milliseconds, and in "
        "brackets",
        "how many times as fast as the same product with bf16 weights, and as dequantising all weights to bf16 first "
        "and",
        "multiplying then.",
        "",
        "| model, tokens, product | bf16 | " + " | ".join(formats) + " |",
        "|---|---:|" + "---|" * len(formats),
    ]
    for entry in record["cases"]:
        plain = f"{entry['contenders'][PLAIN]['ms']:.3f}"
        cells = " | ".join(_cell(entry, name) for name in formats)
        lines.append(f"| {entry['model']}, {entry['tokens']}, {entry['op']} | {plain} | {cells} |")
    lines += ["", *_summary(record, formats)]
    return "\n".join(lines) + "\n"


def _summary(record: dict[str, Any], formats: Sequence[str]) -> list[str]:
    """For each format the geometric means over the cases."""
    lines = []
    for name in formats:
        cases = [entry["contenders"] for entry in record["cases"] if name in entry["contenders"]]
        if cases:
            plain = statistics.geometric_mean(found[PLAIN]["ms"] / found[name]["ms"] for found in cases)
            before = statistics.geometric_mean(
                found[name + AND_DEQUANTISE]["ms"] / found[name]["ms"] for found in cases
            )
            lines.append(f"- {name}: {plain:.2f} times bf16, {before:.2f} times dequantising first (geometric means).")
    same = all(all(entry["same_bits"].values()) for entry in record["cases"])
    if same and lines:
        lines.append("- Every result has the bits of dequantising first.")
    return lines
