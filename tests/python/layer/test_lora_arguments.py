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
