"""Operators on tensors without memory refuse what they refuse on others, in the same words, and make the same of what
they take."""

import random
from typing import Any

import moegemm  # noqa: F401 - registers the operators
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

ops = torch.ops.moegemm

T, TOPK, E, N, K, R = 4, 2, 3, 6, 8, 2
M = T * TOPK


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


FIRST = {"x": floats(T, K), "m_sizes": ints(E), "gather_indices": ints(M), "topk": TOPK, "options": " permute_x"}
SECOND = {
    "m_sizes": ints(E), "gather_indices": ints(M), "router_weights": floats(T, TOPK), "topk": TOPK,
    "options": " permute_y multiply",
}  # fmt: skip
LOW_RANK = {"low_rank_rows": floats(M, R), "m_sizes": ints(E), "gather_indices": None}
W, W_OUT = floats(E, N, K), floats(M, N)
FP4 = {"w": torch.zeros(E, N, 16, dtype=torch.uint8), "w_format": "mxfp4"}
LAYER = {
    "w_gate_up": floats(E, 2 * N, K), "w_down": floats(E, K, N), "gate_up_bias": floats(E, 2 * N),
    "down_bias": floats(E, K), "activation": "silu/concatenated", "transposed": False,
}  # fmt: skip

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "first": ("forward", {**FIRST, "w": W, "bias": floats(E, N)}),
    "second": ("forward", {**SECOND, "x": floats(M, K), "w": W}),
    "flat": ("forward", {"x": floats(M, K), "w": floats(E * N, K), "m_sizes": ints(2, E), "activation": "silu/none"}),
    "ends": ("forward", {"x": floats(M, K), "w": floats(E, K, N), "m_sizes": ints(1, E), "options": " transposed"}),
    "mxfp4": (
        "forward",
        {"x": floats(M, 32), "m_sizes": ints(E), "w_scales": torch.zeros(E, N, 1, dtype=torch.uint8), **FP4},
    ),
    "pair": ("forward_pair", {**FIRST, "w": W, "w_up": W, "bias": None, "activation": "silu/concatenated"}),
    "plain": ("forward_plain", {"x": floats(M, K), "w": W, "m_sizes": ints(E)}),
    "low_rank": ("forward_low_rank", {**LOW_RANK, "x": floats(M, K), "w": W, "low_rank_weights": floats(E, N, R)}),
    "forward_out": ("forward_out", {**SECOND, "x": floats(M, K), "w": W, "config": None, "out": W_OUT}),
    "dx": ("dx", {**SECOND, "dy": floats(M, N), "w": W}),
    "dx_per_token": ("dx", {**SECOND, "dy": floats(T, N), "w": W, "options": " permute_y dy_per_token"}),
    "dx_low_rank": ("dx_low_rank", {**LOW_RANK, "dy": floats(M, N), "w": W, "low_rank_weights": floats(E, R, K)}),
    "dx_out": ("dx_out", {**FIRST, "x": None, "dy": floats(M, N), "w": W, "router_weights": None, "config": None,
                          "out": floats(M, K)}),
    "dw": ("dw", {**SECOND, "dy": floats(M, N), "x": floats(M, K)}),
    "dw_first": ("dw", {**FIRST, "dy": floats(M, N)}),
    "dw_out": ("dw_out", {**FIRST, "dy": floats(M, N), "router_weights": None, "config": None,
                          "options": " permute_x accumulate", "out": floats(E, N, K)}),
    "route": ("route", {"expert_ids": ints(T, TOPK), "num_experts": E, "wide": True, "with_inverse": True}),
    "combine": ("combine", {"rows": floats(M, K), "weights": floats(T, TOPK), "topk": TOPK, "float32_output": False}),
    "combine_out": ("combine_out", {"rows": floats(M, K), "weights": floats(M), "topk": TOPK, "out": floats(T, K)}),
    "scale_rows": ("scale_rows", {"product": floats(M, K), "x": floats(M, K), "m_sizes": ints(E),
                                  "gather_indices": ints(M), "router_weights": floats(M), "topk": TOPK}),
    "route_compact": ("route_compact", {"expert_ids": ints(T, TOPK), "num_experts": E, "max_rows": 5,
                                        "num_tokens": ints(1), "overflow": ints(1), "wide": False, "check": False}),
    "combine_rows": ("combine_rows", {"rows": floats(5, K), "weights": floats(T, TOPK), "positions": ints(T, TOPK),
                                      "float32_output": True}),
    "combine_rows_out": ("combine_rows_out", {"rows": floats(5, K), "weights": None, "positions": ints(T, TOPK),
                                              "out": floats(T, K), "rows_pending": False}),
    "spread_rows": ("spread_rows", {"rows": floats(T, K), "positions": ints(T, TOPK), "gather_indices": ints(5),
                                    "count": 5}),
    "first_slots": ("first_slots", {"expert_ids": ints(T, TOPK), "experts_of_rank": 2, "ranks": 3}),
    "ids_at_target": ("ids_at_target", {"expert_ids": ints(T, TOPK), "gather_indices": ints(5), "experts_of_rank": 2}),
    "index_arrivals": ("index_arrivals", {"counts": ints(2, E), "rows": 5, "room": 4}),
    "layer": ("check_layer", {**LAYER, "x": floats(T, K), "expert_ids": ints(T, TOPK), "router_weights": None}),
    "rows": ("check_expert_rows", {**LAYER, "rows": floats(M, K), "sizes": ints(E), "row_weights": floats(M)}),
    "activate": ("activate", {"pre": floats(M, 2 * N), "bias": floats(E, 2 * N), "m_sizes": ints(E),
                              "activation": "silu/interleaved", "row_weights": floats(M)}),
    "activate_backward": ("activate_backward", {
        "d_act": floats(M, N), "pre": floats(M, 2 * N), "bias": floats(E, 2 * N), "m_sizes": ints(E),
        "gather_indices": ints(M), "router_weights": floats(T, TOPK), "topk": TOPK, "d_out": floats(T, K),
        "down_bias": floats(E, K), "activation": "silu/concatenated", "need_weighted_act": True,
        "need_d_weights": True}),
    "add_weighted_bias": ("add_weighted_bias", {"rows": floats(M, K), "bias": floats(E, K), "m_sizes": ints(E),
                                                "row_weights": floats(M), "out": floats(M, K)}),
    "add_rows": ("add_rows", {"a": floats(M, K), "b": floats(M, K), "m_sizes": ints(E), "out": floats(M, K)}),
    "expert_sums": ("expert_sums", {"rows": floats(T, K), "m_sizes": ints(E), "gather_indices": ints(M),
                                    "router_weights": floats(M), "topk": TOPK}),
    "dequantize": ("dequantize", {"w": FP4["w"], "scales": torch.zeros(E, N, 1, dtype=torch.uint8),
                                  "w_format": "mxfp4", "dtype": torch.bfloat16}),
    "joined_factors": ("joined_factors", {"parts": [floats(E, R, K), floats(E, R, K)], "scalings": [1.0, 2.0],
                                          "counts": [2], "ranks": [1], "like": floats(1), "m_sizes": ints(E)}),
    "scaled_like": ("scaled_like", {"sources": [floats(E, R, K)], "like": [floats(E, K, R).transpose(1, 2)],
                                    "scalings": [1.0]}),
}  # fmt: skip

WORDS = ["", " permute_x", " permute_y", " permute_y multiply", " transposed", " accumulate", " nonsense"]
FORMATS = ["", "fp8/channel", "int4/32", "nf4/64", "nonsense"]
ACTIVATIONS = ["", "silu/none", "silu/concatenated", "relu/none", "nonsense"]


def changed_tensor(tensor: torch.Tensor, pick: random.Random) -> torch.Tensor:
    """Of another shape or dtype, or with other strides."""
    shape = list(tensor.shape)
    dim = pick.randrange(len(shape))
    kind = pick.choice(["longer", "shorter", "none", "doubled", "one more", "one less", "dtype", "dtype", "strided"])
    if kind == "dtype":
        return tensor.to(pick.choice([torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]))
    if kind == "strided":
        wide = torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=tensor.dtype)
        return wide[..., :: pick.choice([1, 2])][..., : shape[-1]]
    if kind == "one more":
        shape.insert(dim, pick.choice([1, 2]))
    elif kind == "one less":
        shape.pop(dim)
    else:
        extent = shape[dim]
        shape[dim] = {"longer": extent + 1, "shorter": max(extent - 1, 0), "none": 0, "doubled": 2 * extent}[kind]
    return torch.zeros(shape, dtype=tensor.dtype)


def changed(name: str, value: Any, pick: random.Random) -> Any:
    """Another value for an argument: one that may not fit the others."""
    if isinstance(value, list) and value:
        at = pick.randrange(len(value))
        other = changed(name, value[at], pick)
        return [*value[:at], other, *value[at + 1 :]]
    if isinstance(value, torch.Tensor):
        return changed_tensor(value, pick)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return pick.choice([-1, 0, 1, value + 1, 3 * value])
    texts = {"options": WORDS, "w_format": FORMATS, "activation": ACTIVATIONS}
    return pick.choice(texts[name]) if name in texts else value


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def outcome(operator: Any, arguments: dict[str, Any], kind: str) -> Any:
    """The facts of what an operator returns, or the words of its refusal."""
    if kind == "real":
        fresh = tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_contiguous() else t, arguments)
        mode: Any = torch.no_grad()
    elif kind == "meta":
        fresh = tree_map_only(torch.Tensor, on_meta, arguments)
        mode = torch.no_grad()
    else:
        mode = FakeTensorMode()
        fresh = tree_map_only(torch.Tensor, mode.from_tensor, arguments)
    try:
        with mode:
            results = operator(**fresh)
    except RuntimeError as error:
        return str(error).replace(" on meta", " on cpu")
    return [(tuple(t.shape), t.dtype, t.stride()) for t in tree_leaves(results) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_outcome_as_with_memory(name, kind):
    operator_name, base = CALLS[name]
    operator = getattr(ops, operator_name).default
    known = {argument.name for argument in operator._schema.arguments}
    base = {key: value for key, value in base.items() if key in known}
    assert isinstance(outcome(operator, base, "real"), list), outcome(operator, base, "real")
    pick = random.Random(name)
    refused = 0
    for _ in range(80):
        arguments = dict(base)
        for key in pick.sample(sorted(base), pick.choice([0, 1, 1, 1, 2])):
            arguments[key] = changed(key, arguments[key], pick)
            if key in ("gather_indices", "router_weights", "bias") and pick.random() < 0.1:
                arguments[key] = None
        expected = outcome(operator, arguments, "real")
        refused += isinstance(expected, str)
        shapes = tree_map_only(torch.Tensor, lambda t: (list(t.shape), t.dtype, t.stride()), arguments)
        assert outcome(operator, arguments, kind) == expected, shapes
    assert refused > 10


@pytest.mark.parametrize("dynamic", [False, True])
def test_tracing_refuses_what_the_call_would(dynamic):
    compiled = torch.compile(lambda *tensors: ops.dx(*tensors), fullgraph=True, dynamic=dynamic, backend="eager")
    assert compiled(floats(M, N), W, ints(E)).shape == (M, K)
    with pytest.raises(RuntimeError, match=r"W is fp32.4, 6, 8.* one matrix for each of the E = 3 entries of m_sizes"):
        compiled(floats(M, N), floats(E + 1, N, K), ints(E))
    with pytest.raises(RuntimeError, match="its last dimension must be N = 6 as in W"):
        compiled(floats(M, N + 1), W, ints(E))
