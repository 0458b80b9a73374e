"""Factors that stay in the form of the products: inside moegemm.keep_factors, and nowhere else."""

import moegemm
import pytest
import torch
from layer_reference import make_layer
from test_lora import adapters, run
from test_lora_factors import HIDDEN, INNER, Copies, peft_factors


def peft_lows(device, rank=16):
    """Adapters on both products as PEFT has them, and their parameters, which the adapters view."""
    parameters, lows = [], []
    for sizes in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)):
        (a, b), low = peft_factors(*sizes, rank, device)
        own = [torch.nn.Parameter(a.detach()), torch.nn.Parameter(b.detach())]
        experts, n = low.A.size(0), low.B.size(1)
        a, b = own[0].view(experts, rank, -1), own[1].view(n, rank, experts).permute(2, 0, 1)
        parameters += own
        lows.append(low._replace(A=a, B=b))
    return parameters, lows


def views_of(parameters, lows):
    """New views of the same parameters, as every forward of PEFT makes them."""
    rank, experts = lows[0].A.size(1), lows[0].A.size(0)
    found = []
    for low, (a, b) in zip(lows, zip(parameters[::2], parameters[1::2], strict=True), strict=True):
        b = b.view(low.B.size(1), rank, experts).permute(2, 0, 1)
        found.append(low._replace(A=a.view(experts, rank, -1), B=b))
    return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("rank", [5, 16])
def test_only_the_first_call_copies_and_all_have_the_same_bits(device, mode, rank):
    layer = make_layer(device, torch.bfloat16)
    parameters, lows = peft_lows(device, rank)
    with mode():
        outside = run(layer, *lows)
        with moegemm.keep_factors():
            assert torch.equal(run(layer, *views_of(parameters, lows)), outside)
            with Copies() as copies:
                again = run(layer, *views_of(parameters, lows))
        with Copies() as after:
            run(layer, *lows)
    assert torch.equal(again, outside)
    assert copies.seen == []
    assert after.seen == ["moegemm::joined_factors"]


@pytest.mark.parametrize("which", range(4))
def test_a_write_that_torch_sees_counts(device, which):
    layer = make_layer(device, torch.bfloat16)
    parameters, lows = peft_lows(device)
    with torch.no_grad(), moegemm.keep_factors():
        before = run(layer, *views_of(parameters, lows))
        parameters[which].mul_(-2.0)
        inside = run(layer, *views_of(parameters, lows))
    with torch.no_grad():
        assert torch.equal(inside, run(layer, *views_of(parameters, lows)))
    assert not torch.equal(inside, before)


def test_after_it_every_write_counts(device):
    layer = make_layer(device, torch.bfloat16)
    parameters, lows = peft_lows(device)
    with torch.no_grad():
        with moegemm.keep_factors():
            before = run(layer, *views_of(parameters, lows))
            parameters[1].data.mul_(-2.0)
        assert not torch.equal(run(layer, *views_of(parameters, lows)), before)


def test_switched_adapters_and_scalings_are_told_apart(device):
    layer = make_layer(device, torch.bfloat16)
    _, lows = peft_lows(device)
    _, others = peft_lows(device)
    sets = [lows, others, [low._replace(scaling=0.25) for low in lows], [lows[0], None], [None, lows[1]]]
    sets.append([[lows[0], others[0]], others[1]])
    with torch.no_grad():
        outside = [run(layer, *one) for one in sets]
        with moegemm.keep_factors():
            for _ in range(2):
                for one, expected in zip(sets, outside, strict=True):
                    assert torch.equal(run(layer, *one), expected)


def test_factors_that_are_no_parameters_are_made_for_each_call(device):
    """Their memory may be another's in the next one."""
    layer = make_layer(device, torch.bfloat16)
    _, lows = peft_lows(device)
    with torch.no_grad(), moegemm.keep_factors():
        for _ in range(2):
            made = [low._replace(A=low.A.clone(), B=low.B.clone()) for low in lows]
            with Copies() as copies:
                run(layer, *made)
            assert copies.seen == ["moegemm::joined_factors"]


def test_gradients_are_as_they_are_outside(device):
    layer = make_layer(device, torch.bfloat16)
    gate_up, down = adapters(layer)
    leaves = [gate_up.A, gate_up.B, down.A, down.B]
    outside = torch.autograd.grad(run(layer, gate_up, down).sum(), leaves)
    with moegemm.keep_factors():
        with torch.no_grad():
            run(layer, gate_up, down)
        inside = torch.autograd.grad(run(layer, gate_up, down).sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))


@pytest.mark.parametrize("first_call", [True, False])
def test_a_captured_graph_reads_what_was_made_before_it(device, first_call):
    if device == "cpu":
        pytest.skip("graphs are captured on a GPU")
    layer = make_layer(device, torch.bfloat16)
    parameters, lows = peft_lows(device)
    with torch.no_grad():
        expected = run(layer, *lows)
        torch.cuda.synchronize()
        with moegemm.keep_factors():
            if first_call:
                run(layer, *views_of(parameters, lows))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = run(layer, *views_of(parameters, lows))
            eager = run(layer, *views_of(parameters, lows))  # before anything was replayed
            graph.replay()
            assert torch.equal(eager, expected)
            assert torch.equal(out, expected)
