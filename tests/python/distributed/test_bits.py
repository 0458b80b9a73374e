"""Experts that are spread over ranks give the bits of one process with all tokens."""

import moegemm
import pytest
import torch
import torch.distributed as dist
from distributed.cases import BY_NAME, CASES, Case, Layer, build, leaf
from moegemm.distributed import AllToAll, expert_parallel_mlp

Found = dict[str, torch.Tensor | None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(layer: Layer, tokens: slice, experts: slice, call) -> Found:
    """Output and gradients of `call` with a part of the layer's tokens and experts."""
    trained = not layer.case.frozen

    def part(tensor, where, needs_grad):
        return None if tensor is None else leaf(tensor[where], needs_grad)

    x = part(layer.x, tokens, layer.case.x_needs_grad)
    router_weights = part(layer.router_weights, tokens, True)
    w_gate_up, w_down = part(layer.w_gate_up, experts, trained), part(layer.w_down, experts, trained)
    biases = {
        "gate_up_bias": part(layer.gate_up_bias, experts, trained),
        "down_bias": part(layer.down_bias, experts, trained),
    }
    out = call(x, w_gate_up, w_down, layer.ids[tokens], router_weights, **layer.options, **biases)
    out.backward(layer.d_out[tokens])
    leaves = {"x": x, "router_weights": router_weights, "w_gate_up": w_gate_up, "w_down": w_down, **biases}
    return {"out": out.detach(), **{f"d {name}": t.grad for name, t in leaves.items() if t is not None}}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def differences(case: Case, dtype_name: str, device: str = "cpu", **of_dispatcher) -> list[str]:
    """Which of this rank's results have other bits than one process gives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = build(case, size, DTYPES[dtype_name], device)
    expected = run(layer, slice(None), slice(None), moegemm.moe_mlp)
    dispatcher = AllToAll(None, case.experts, **of_dispatcher)
    tokens, experts = layer.tokens_of(rank), layer.experts_of(rank)

    def call(*tensors, **options):
        return expert_parallel_mlp(*tensors, dispatcher=dispatcher, **options)

    found = run(layer, tokens, experts, call)
    dispatcher.check()
    wrong = []
    for name, value in found.items():
        whole = expected[name]
        if whole is None or value is None:
            wrong += [name] if (whole is None) != (value is None) else []
            continue
        where = tokens if name in ("out", "d x", "d router_weights") else experts
        if not torch.equal(bits(value), bits(whole[where])):
            wrong.append(f"{name}: off by {(value.double() - whole[where].double()).abs().max():.3g}")
    return wrong


def all_differences(names: list[str], dtype_name: str, device: str, of_dispatcher: dict) -> dict[str, list[str]]:
    found = {name: differences(BY_NAME[name], dtype_name, device, **of_dispatcher) for name in names}
    return {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("of_dispatcher", [{}, {"rows_per_peer": 700}], ids=["exact splits", "room for all"])
def test_output_and_gradients_have_the_bits_of_one_process(ranks, size, dtype, of_dispatcher):
    names = [case.name for case in CASES]
    assert ranks(size).run(all_differences, names, dtype, "cpu", of_dispatcher) == [{}] * size


def make_adapters(experts: slice, dtype: torch.dtype, dropout: float = 0.0) -> tuple[list, list]:
    """Adapters of all experts of the layer with biases, and of these experts alone."""
    shapes = ((24, 40), (20, 24))
    whole = [moegemm.LoraAdapter(8, k, n, rank=4, dtype=dtype) for k, n in shapes]
    count = experts.stop - experts.start
    mine = [moegemm.LoraAdapter(count, k, n, rank=4, dropout=dropout, dtype=dtype) for k, n in shapes]
    random = torch.Generator().manual_seed(9)
    for of_all, of_rank in zip(whole, mine, strict=True):
        with torch.no_grad():
            for a, b in zip(of_all.parameters(), of_rank.parameters(), strict=True):
                a.copy_(torch.randn(a.shape, generator=random) * 0.3)
                b.copy_(a[experts])
    return whole, mine


def run_adapted(layer, call, where: slice, part: slice, adapters: list, **options) -> tuple:
    x, weights = leaf(layer.x[where]), leaf(layer.router_weights[where])
    biases = {"gate_up_bias": layer.gate_up_bias[part], "down_bias": layer.down_bias[part]}
    stacks = layer.w_gate_up[part], layer.w_down[part]
    out = call(x, *stacks, layer.ids[where], weights, gate_up=adapters[0], down=adapters[1], **biases, **options)
    out.backward(layer.d_out[where])
    return out.detach(), weights.grad, x.grad, [p.grad for adapter in adapters for p in adapter.parameters()]


def lora_differences(dtype_name: str, of_dispatcher: dict) -> list[str]:
    """The same for adapters beside frozen experts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[dtype_name]
    layer = build(BY_NAME["biases"], size, dtype)
    experts, tokens = layer.experts_of(rank), layer.tokens_of(rank)
    whole, mine = make_adapters(experts, dtype)
    expected = run_adapted(layer, moegemm.lora_moe_mlp, slice(None), slice(None), whole)
    found = run_adapted(
        layer, expert_parallel_mlp, tokens, experts, mine, dispatcher=AllToAll(None, 8, **of_dispatcher)
    )
    named = zip(("out", "d weights", "d x"), found, expected, strict=False)
    wrong = [name for name, a, b in named if not same(a, b[tokens])]
    pairs = zip(found[3], expected[3], strict=True)
    return wrong + [f"adapter {i}" for i, (a, b) in enumerate(pairs) if not same(a, b[experts])]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_dispatcher", [{}, {"rows_per_peer": 100}], ids=["exact splits", "room for all"])
def test_adapters_have_the_bits_of_one_process(ranks, dtype, of_dispatcher):
    assert ranks(2).run(lora_differences, dtype, of_dispatcher) == [[], []]
