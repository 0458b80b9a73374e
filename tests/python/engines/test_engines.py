"""What dispatchers hand over gives the plain layer's output and gradients, whatever lies between the rows."""

import pytest
import torch
from layer_reference import GATED, Layer, reference_gradients, relative_error
from receive_buffers import ALIGNMENTS, ENGINES, EXPERT_MAJOR, EXPERTS, FIRST, LOCAL, Batch

HIDDEN, INNER, RANKS, TOPK = 24, 40, 3, 3


def make_batch(device: str, routing: str, bias: bool, activation: str = "swiglu", tokens: int = 23) -> Batch:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    columns = 2 * INNER if activation in GATED else INNER
    ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices
    if routing == "empty experts":  # of the rank's experts only one has rows
        ids[(ids >= FIRST) & (ids < FIRST + LOCAL) & (ids != FIRST + 2)] = 0
    elif routing == "one expert":
        ids[:, 0] = FIRST + 1
    elif routing == "no rows":
        ids[(ids >= FIRST) & (ids < FIRST + LOCAL)] = 0
    experts = {
        "w_gate_up": torch.randn(LOCAL, columns, HIDDEN) * 2 * HIDDEN**-0.5,
        "w_down": torch.randn(LOCAL, HIDDEN, INNER) * INNER**-0.5,
        "gate_up_bias": torch.randn(LOCAL, columns) if bias else None,
        "down_bias": torch.randn(LOCAL, HIDDEN) if bias else None,
    }
    leaves = {name: None if t is None else t.to(device, dtype).requires_grad_() for name, t in experts.items()}
    return Batch(
        torch.randn(tokens, HIDDEN).to(device, dtype).requires_grad_(),
        ids.to(device),
        torch.rand(tokens, TOPK).to(device).requires_grad_(),
        leaves,
        RANKS,
        {"activation": activation},
    )


def check(engine: str, batch: Batch, alignment: int = 1, tails: str = "zero") -> None:
    given = {"x": batch.x, **batch.experts, "router_weights": batch.router_weights}
    options = {"layout": "concatenated", "transposed": False, **batch.options}
    layer = Layer({name: t if t is None else t.detach() for name, t in given.items()}, batch.local_ids(), options)
    d_out = torch.randn_like(batch.x)
    expected = reference_gradients(layer, d_out)
    out = ENGINES[engine](batch, alignment, tails)
    leaves = {name: t for name, t in given.items() if t is not None}
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out)
    limit = 3e-6 if batch.x.dtype == torch.float32 else 3 * torch.finfo(batch.x.dtype).eps
    for name, value in {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}.items():
        assert value.isfinite().all(), name
        if expected[name].any():
            assert relative_error(value, expected[name]) <= limit, name
        else:
            assert not value.any(), name


@pytest.mark.parametrize("tails", ["zero", "undefined"])
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("engine", EXPERT_MAJOR)
def test_rows_at_any_alignment(device, engine, alignment, tails):
    check(engine, make_batch(device, "random", bias=True), alignment, tails)


@pytest.mark.parametrize("routing", ["random", "empty experts", "one expert", "no rows"])
@pytest.mark.parametrize("tails", ["zero", "undefined"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_routing(device, engine, tails, routing):
    check(engine, make_batch(device, routing, bias=False), 8, tails)


@pytest.mark.parametrize("activation", ["clamped_swiglu", "relu2"])
@pytest.mark.parametrize("engine", ENGINES)
def test_biases_and_other_activations(device, engine, activation):
    check(engine, make_batch(device, "random", bias=True, activation=activation), 16, "undefined")
