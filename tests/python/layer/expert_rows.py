"""Rows in expert order with random weights, and one call of experts_mlp with all its gradients."""

import moegemm
import torch
from layer_reference import GATED

SIZES = (5, 0, 3, 9, 1)


def make_rows(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, ...] = SIZES,
    tail: int = 4,
    hidden: int = 24,
    inner: int = 40,
    activation: str = "swiglu",
    layout: str = "concatenated",
    transposed: bool = False,
    bias: bool = False,
    weighted: bool = True,
    weights_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[dict[str, torch.Tensor | None], dict]:
    """Tensors by argument name, and options. The last `tail` rows belong to nobody and hold NaN."""
    experts, count = len(sizes), sum(sizes) + tail
    columns = 2 * inner if activation in GATED else inner
    gate_up = torch.randn(experts, columns, hidden) * 2 * hidden**-0.5
    down = torch.randn(experts, hidden, inner) * inner**-0.5
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    rows, row_weights = torch.randn(count, hidden), torch.rand(count) + 0.5
    rows[count - tail :], row_weights[count - tail :] = torch.nan, torch.nan
    tensors = {
        "rows": rows.to(device, dtype),
        "w_gate_up": gate_up.to(device, dtype),
        "w_down": down.to(device, dtype),
        "row_weights": row_weights.to(device, weights_dtype) if weighted else None,
        "gate_up_bias": torch.randn(experts, columns).to(device, dtype) if bias else None,
        "down_bias": torch.randn(experts, hidden).to(device, dtype) if bias else None,
    }
    options = {"activation": activation, "layout": layout, "transposed": transposed}
    return tensors, {"sizes": torch.tensor(sizes, device=device, dtype=index_dtype), **options}


def leaves_of(tensors: dict) -> dict:
    return {name: None if t is None else t.detach().clone().requires_grad_() for name, t in tensors.items()}


def results(tensors: dict, options: dict, d_out: torch.Tensor, **more) -> dict[str, torch.Tensor]:
    """The output and every gradient, by argument name."""
    mine = leaves_of(tensors)
    out = moegemm.experts_mlp(**mine, **options, **more)
    given = {name: t for name, t in mine.items() if t is not None}
    gradients = torch.autograd.grad(out, list(given.values()), d_out)
    return {"out": out.detach(), **dict(zip(given, gradients, strict=True))}


def as_pairs(tensors: dict, options: dict) -> dict:
    """The same tensors with gate and up apart."""
    inner = tensors["w_gate_up"].size(2 if options["transposed"] else 1) // 2
    pairs = dict(tensors)
    pairs["w_gate_up"] = tuple(
        t.contiguous() for t in tensors["w_gate_up"].split(inner, 2 if options["transposed"] else 1)
    )
    if tensors["gate_up_bias"] is not None:
        pairs["gate_up_bias"] = tuple(t.contiguous() for t in tensors["gate_up_bias"].split(inner, 1))
    return pairs


def check_replays(tensors: dict, options: dict, segments: list[dict]) -> None:
    """A CUDA graph of the layer and its gradients gives the bits of a call with each of `segments`, tensors of
    `options` that are overwritten before a replay."""
    tensors = {name: t.nan_to_num() for name, t in tensors.items()}
    mine = leaves_of(tensors)
    d_out = torch.randn_like(tensors["rows"])
    given = list(mine.values())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(moegemm.experts_mlp(**mine, **options), given, d_out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moegemm.experts_mlp(**mine, **options)
        gradients = torch.autograd.grad(out, given, d_out)
    for changed in segments:
        for name, values in changed.items():
            options[name].copy_(torch.tensor(values))
        graph.replay()
        expected = results(tensors, options, d_out)
        assert torch.equal(out, expected["out"])
        for name, value in zip(mine, gradients, strict=True):
            assert torch.equal(value, expected[name]), name
