"""What is measured of one layer: times in a round robin, memory, the first call, agreement, and the passes."""

import gc
import time
from collections.abc import Callable
from typing import Any

import moegemm
import torch
from moegemm.activations import activation_named
from moegemm.bench.cases import Model
from moegemm.bench.timing import Clock, spread
from torch import Tensor

from layer.contenders import Layer

MIB = 1 << 20


def relative_difference(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in parts: fp32 copies of a large model's gradients would not fit."""
    squares, total = 0.0, 0.0
    for left, right in zip(a.detach().flatten().split(1 << 28), b.detach().flatten().split(1 << 28), strict=True):
        squares += (left.float() - right.float()).square().sum().item()
        total += right.float().square().sum().item()
    return (squares / max(total, 1e-30)) ** 0.5


def first_calls(call: Callable[[], object], clock: Clock) -> list[float]:
    """Milliseconds of the first and of the second call, on the host's clock."""
    times = []
    for _ in range(2):
        clock.synchronize()
        begin = time.perf_counter()
        call()
        clock.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def kept_mib(layer: Layer, name: str) -> float:
    """Memory that a forward pass leaves allocated for its backward, without its output."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = layer.calls[name]()
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    # x is the layer's input and outlives the call; it is kept all the same.
    return (kept + layer.x.numel() * layer.x.element_size()) / MIB


def disagreement(layer: Layer) -> dict[str, float]:
    """Of the output and every gradient, in the norm."""
    kept: dict[str, dict[str, Tensor]] = {}
    for name, call in layer.calls.items():
        layer.clear_gradients()
        out = call()
        out.backward(layer.d_out)
        kept[name] = {"out": out.detach(), **{k: v.grad for k, v in layer.leaves().items()}}
    layer.clear_gradients()
    mine, theirs = kept.values()
    return {k: relative_difference(mine[k], theirs[k]) for k in mine}


def passes(layer: Layer, clock: Clock, rounds: int) -> list[dict[str, Any]]:
    """The layer's passes over rows, in a round robin with a copy of as many bytes for each."""
    e, ids, ops = layer.experts, layer.ids, torch.ops.moegemm
    topk, inner = ids.size(1), e.down_proj.size(1 if e.is_transposed else 2)
    rows, hidden = ids.numel(), layer.x.size(1)
    m_sizes, gather = moegemm.route(ids, e.num_experts)
    named = ("clamped_swiglu", "interleaved") if e.has_bias else ("swiglu", "concatenated")
    activation = activation_named(*named, None, None, None).text()
    bias, down_bias = (e.gate_up_proj_bias.detach(), e.down_proj_bias.detach()) if e.has_bias else (None, None)
    pre = torch.randn(rows, 2 * inner, device=ids.device, dtype=layer.x.dtype)
    d_act = torch.randn(rows, inner, device=ids.device, dtype=layer.x.dtype)
    weights = layer.router_weights.detach()

    def backward(*share: Tensor | None) -> object:
        return ops.activate_backward(d_act, pre, bias, m_sizes, gather, weights, topk, *share, activation, True, True)

    # Bytes read and written: of rows, and with the second bias of its row of the output's gradient for each of them.
    inner_bytes, hidden_bytes = (rows * width * pre.element_size() for width in (inner, hidden))
    passes: dict[str, tuple[int, Callable[[], object]]] = {
        "activation": (3 * inner_bytes, lambda: ops.activate(pre, bias, m_sizes, activation)),
        "its backward": (6 * inner_bytes, lambda: backward(None, None)),
    }
    if e.has_bias:
        passes |= {
            "its backward, both biases": (6 * inner_bytes + hidden_bytes, lambda: backward(layer.d_out, down_bias)),
            "gradient of the first bias": (2 * inner_bytes, lambda: ops.expert_sums(pre, m_sizes, None, None, 1)),
            "gradient of the second bias": (
                hidden_bytes, lambda: ops.expert_sums(layer.d_out, m_sizes, gather, weights, topk)
            ),
        }  # fmt: skip
    most = max(moved for moved, _ in passes.values()) // 2
    source, target = (torch.zeros(most, device=ids.device, dtype=torch.uint8) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {}
    for name, (moved, call) in passes.items():
        calls[name] = call
        calls[f"copy, {name}"] = lambda half=moved // 2: target[:half].copy_(source[:half])
    ms = {name: spread(times)["ms"] for name, times in clock.round_robin(calls, rounds).items()}
    return [
        {"pass": name, "bytes": moved, "ms": ms[name], "copy_ms": ms[f"copy, {name}"]}
        for name, (moved, _) in passes.items()
    ]


def measure(
    model: Model, tokens: int, variant: str, dtype: torch.dtype, device: str, rounds: int, clock: Clock
) -> dict[str, Any]:
    layer = Layer.of(model, tokens, dtype, device, variant)
    entry: dict[str, Any] = {"model": model.name, "tokens": tokens, "variant": variant, "first_calls_ms": {}}
    for name in layer.calls:
        entry["first_calls_ms"][name] = first_calls(layer.forward_backward(name), clock)
    layer.clear_gradients()
    entry["disagreement"] = disagreement(layer)
    entry["forward"] = {
        name: spread(t) for name, t in clock.round_robin({n: layer.forward(n) for n in layer.calls}, rounds).items()
    }
    both = {n: layer.forward_backward(n) for n in layer.calls}
    entry["forward_backward"] = {name: spread(t) for name, t in clock.round_robin(both, rounds).items()}
    layer.clear_gradients()
    if device == "cuda":
        entry["kept_mib"] = {name: kept_mib(layer, name) for name in layer.calls}
        entry["passes"] = passes(layer, clock, rounds)
    return entry
