"""What lora_moe_mlp and its adapters take, and that nothing they are given is ignored."""

import moegemm
import pytest
import torch
from layer_reference import make_layer

EXPERTS, HIDDEN, INNER = 6, 24, 40


def called(layer, *adapters, **options) -> torch.Tensor:
    t = layer.tensors
    given = (t["x"], t["w_gate_up"], t["w_down"], layer.expert_ids, t["router_weights"])
    return moegemm.lora_moe_mlp(*given, *adapters, **{**layer.options, **options})


def both_adapters(dropout: float = 0.0) -> list[moegemm.LoraAdapter]:
    made = [moegemm.LoraAdapter(EXPERTS, k, n, 8, dropout=dropout) for k, n in ((HIDDEN, 2 * INNER), (INNER, HIDDEN))]
    for adapter in made:
        torch.nn.init.normal_(adapter.B, std=0.3)
    return made


@pytest.mark.parametrize(
    "option",
    [
        {"out": torch.zeros(4)}, {"weight_gradients": None}, {"accumulate": False}, {"tails": "zero"}, {"topk": 2},
        {"alhpa": 2.0},
    ],
)  # fmt: skip
def test_a_keyword_that_it_does_not_know_is_refused(option):
    (name,) = option
    with pytest.raises(TypeError, match=rf"lora_moe_mlp\(\) got .* '{name}'; accepted are .*overflow, .*alpha"):
        called(make_layer(), *both_adapters(), **option)


@pytest.mark.parametrize("grad", [True, False])
def test_tokens_and_rows_are_a_capacity(grad):
    layer, adapters = make_layer(), both_adapters()
    ids, slots = layer.expert_ids, layer.expert_ids.clone()
    slots[5:] = -1
    kept = int(((slots >= 0) & (slots < EXPERTS)).sum())
    overflow = torch.zeros(1, dtype=torch.int32)
    with torch.set_grad_enabled(grad):
        whole = called(layer, *adapters)
        first = called(layer, *adapters, num_tokens=torch.tensor(5), max_rows=kept, overflow=overflow)
        assert ids.size(0) > 5
        assert torch.equal(first[:5], whole[:5])
        assert not first[5:].any()
        assert overflow.item() == 0
        called(layer, *adapters, num_tokens=torch.tensor(5), max_rows=kept - 1, overflow=overflow)
    assert overflow.item() == 1


def test_allow_tf32_reaches_the_products(monkeypatch):
    layer, seen = make_layer(), []
    from moegemm.lora import layer as module

    real = module.stored_weights
    monkeypatch.setattr(module, "stored_weights", lambda *given: seen.append(given[3]) or real(*given))
    for allowed in (True, False, None):
        called(layer, *both_adapters(), allow_tf32=allowed)
    assert seen == [True, False, False]


@pytest.mark.parametrize("name", ["max_rows", "num_tokens", "overflow"])
def test_an_adapter_that_drops_takes_no_capacity(name):
    value = {"max_rows": 40, "num_tokens": torch.tensor(3), "overflow": torch.zeros(1, dtype=torch.int32)}[name]
    with pytest.raises(NotImplementedError, match=f"{name} .* with an adapter that drops; only None is accepted"):
        called(make_layer(), *both_adapters(dropout=0.5), **{name: value})


def pair(a=(EXPERTS, 4, HIDDEN), b=(EXPERTS, 2 * INNER, 4), scaling=1.0, dropout=0.0) -> moegemm.LowRank:
    a, b = (torch.zeros(shape) if isinstance(shape, tuple) else shape for shape in (a, b))
    return moegemm.LowRank(a, b, scaling, dropout)


@pytest.mark.parametrize(
    ("adapter", "error", "message"),
    [
        (3, TypeError, "gate_up is 3 of type int; a LoraAdapter, a LowRank, a sequence of them or None is accepted"),
        (pair(a=None), TypeError, r"gate_up\.A is None; a torch\.Tensor is accepted"),
        (pair(b=[1]), TypeError, r"gate_up\.B is \[1\] of type list; a torch\.Tensor is accepted"),
        (pair(scaling=None), TypeError, r"gate_up\.scaling is None of type NoneType; a number is accepted"),
        (pair(scaling="x"), TypeError, r"gate_up\.scaling is 'x' of type str; a number is accepted"),
        (pair(scaling=float("nan")), ValueError, r"gate_up\.scaling is nan; a finite number is accepted"),
        (pair(dropout=-1.0), ValueError, r"gate_up\.dropout is -1\.0; it must be in \[0, 1\)"),
        (pair(dropout=1.5), ValueError, r"gate_up\.dropout is 1\.5; it must be in \[0, 1\)"),
    ],
)
def test_a_pair_that_is_none_is_named(adapter, error, message):
    with pytest.raises(error, match=message):
        called(make_layer(), adapter)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rank": 2.5}, TypeError, r"rank is 2\.5 of type float; an int is accepted"),
        ({"rank": "8"}, TypeError, "rank is '8' of type str; an int is accepted"),
        ({"rank": True}, TypeError, "rank is True of type bool; an int is accepted"),
        ({"experts": 0}, ValueError, "experts is 0; it must be at least 1"),
        ({"experts": -1}, ValueError, "experts is -1; it must be at least 1"),
        ({"in_features": 0}, ValueError, "in_features is 0; it must be at least 1"),
        ({"out_features": 0}, ValueError, "out_features is 0; it must be at least 1"),
        ({"alpha": "x"}, TypeError, "alpha is 'x' of type str; a number is accepted"),
        ({"dropout": float("nan")}, ValueError, r"dropout is nan; it must be in \[0, 1\)"),
        ({"dtype": torch.int32}, TypeError, r"dtype is torch\.int32; bf16, fp16, fp32 or None is accepted"),
        ({"dtype": "bf16"}, TypeError, r"dtype is 'bf16'; bf16, fp16, fp32 or None is accepted"),
    ],
)
def test_an_adapter_that_cannot_be_is_named(change, error, message):
    with pytest.raises(error, match=message):
        moegemm.LoraAdapter(**{"experts": 4, "in_features": 8, "out_features": 6, "rank": 2, **change})


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (moegemm.quantize(torch.randn(4, 64, 64), "mxfp4"), r"w is in mxfp4; .*: w\.dequantize\(\) is accepted"),
        (torch.zeros(4, 64, 64, dtype=torch.int32), r"w has dtype torch\.int32; a floating dtype is accepted"),
        ([1], r"w is \[1\] of type list; a torch\.Tensor is accepted"),
        (torch.zeros(4, 64, 64, device="meta"), "w is on meta; it must be on cpu, where A is"),
    ],
    ids=["quantised", "integers", "list", "meta"],
)
def test_what_nothing_can_be_merged_into_is_named(w, message):
    adapter = moegemm.LoraAdapter(4, 64, 64, 2)
    for function in (adapter.merged, adapter.unmerged):
        with pytest.raises(TypeError, match=message):
            function(w)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
@pytest.mark.parametrize("autocast", [False, True])
def test_factors_of_an_unknown_dtype_are_named_inside_autocast_too(autocast, dtype):
    layer, x = make_layer(), "torch.bfloat16" if autocast else "torch.float32"
    odd = [pair(torch.zeros(EXPERTS, 4, HIDDEN, dtype=dtype), torch.zeros(EXPERTS, 2 * INNER, 4, dtype=dtype))]
    message = rf"gate_up\.A has dtype {dtype}; it must have {x}, the dtype of x, or torch\.float32"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(TypeError, match=message):
        called(layer, odd)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_in_any_format_are_taken_inside_autocast(dtype):
    layer, (gate_up, down) = make_layer(), both_adapters()
    with torch.autocast("cpu", torch.bfloat16):
        assert called(layer, gate_up.to(dtype), down.to(dtype)).dtype == torch.bfloat16
