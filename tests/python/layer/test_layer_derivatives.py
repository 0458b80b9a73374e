"""What the layer refuses of derivatives, and the transforms of torch.func that it takes part in."""

import moegemm
import pytest
import torch
from layer_reference import Layer, make_layer
from moegemm.expert_layer.layer import Routed
from moegemm.expert_layer.products import expert_product, first_product, second_product
from second_derivatives import FORWARD_MODE, WAYS, second_derivative
from torch.autograd import forward_ad

NAMES = ["x", "w_gate_up", "w_down", "router_weights", "gate_up_bias", "down_bias"]


CALLS = ["moe_mlp", "lora_moe_mlp", "experts_mlp"]


def call_of(name: str, layer: Layer):
    """Runs the layer with some of its tensors replaced."""
    adapters = {}
    if name == "lora_moe_mlp":
        for place, k, n in (("gate_up", 24, 80), ("down", 40, 24)):
            torch.manual_seed(k)
            adapters[place] = moegemm.LoraAdapter(6, k, n, 4, device=layer.expert_ids.device)
            torch.nn.init.normal_(adapters[place].B, std=0.1)
    function = getattr(moegemm, name)
    sizes = torch.tensor([3, 0, 4, 2, 1, 1], device=layer.expert_ids.device)

    def run_rows(**changes: torch.Tensor) -> torch.Tensor:
        tensors = {**layer.tensors, **changes}
        rows, weights = tensors.pop("x"), tensors.pop("router_weights")[:, 0]
        return moegemm.experts_mlp(rows, sizes=sizes, row_weights=weights, **tensors, **layer.options)

    if name == "experts_mlp":
        return run_rows

    def run(**changes: torch.Tensor) -> torch.Tensor:
        tensors = {**layer.tensors, **changes}
        return function(expert_ids=layer.expert_ids, **tensors, **adapters, **layer.options)

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_second_derivatives_are_refused(device, call, way, name):
    layer = make_layer(device, bias=True)
    run = call_of(call, layer)

    def loss(t: torch.Tensor) -> torch.Tensor:
        return run(**{name: t}).square().sum()

    # Tangents are refused before there is anything to differentiate backward.
    message = "has no forward-mode derivative" if way in FORWARD_MODE else "can be differentiated once only"
    with pytest.raises(RuntimeError, match=message):
        second_derivative(way, loss, layer.tensors[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_is_refused_by_name(device, call, name):
    layer = make_layer(device, bias=True)
    run, t = call_of(call, layer), layer.tensors[name]
    expected = run()
    with pytest.raises(NotImplementedError, match=rf"^{call} has no forward-mode derivative; moegemm\.grouped_gemm"):
        torch.func.jvp(lambda t: run(**{name: t}), (t,), (t,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        run(**{name: forward_ad.make_dual(t, t)})
    with forward_ad.dual_level():
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("which", ["first", "second", "within"])
def test_single_products_refuse_what_they_cannot_differentiate(device, which):
    routed = Routed(*moegemm.route(torch.tensor([[0, 2], [1, 0]], device=device), 3), 2)
    x, w = torch.randn(2 if which == "first" else 4, 5, device=device), torch.randn(3, 6, 5, device=device)
    product = {"first": first_product, "second": second_product, "within": expert_product}[which]
    for way in ("backward", "func.grad of grad"):
        with pytest.raises(RuntimeError, match="a product of an expert layer can be differentiated once only"):
            second_derivative(way, lambda t: product(t, w, routed).square().sum(), x)
    with pytest.raises(NotImplementedError, match="a product of an expert layer has no forward-mode derivative"):
        torch.func.jvp(lambda t: product(x, t, routed), (w,), (w,))


@pytest.mark.parametrize("call", CALLS)
def test_functional_gradients_are_those_of_backward(device, call):
    layer = make_layer(device, bias=True)
    leaves, run = layer.leaves(), call_of(call, layer)
    run(**leaves.tensors).square().sum().backward()
    gradients = torch.func.grad(lambda tensors: run(**tensors).square().sum())(layer.tensors)
    for name in NAMES:
        assert torch.equal(gradients[name], leaves.tensors[name].grad), name
    x = layer.tensors["x"]
    out, pull_back = torch.func.vjp(lambda t: run(x=t), x)
    assert torch.equal(pull_back(2 * out)[0], gradients["x"])


@pytest.mark.parametrize("call", CALLS)
def test_vmap_is_refused(device, call):
    layer = make_layer(device)
    run, x = call_of(call, layer), layer.tensors["x"]
    shown = call if call == "experts_mlp" else "an expert layer"
    with pytest.raises(NotImplementedError, match=f"^{shown} cannot be vmapped"):
        torch.func.vmap(lambda t: run(x=t))(x.expand(3, -1, -1))


def test_an_unused_output_has_no_gradient(device):
    layer = make_layer(device)
    x = layer.tensors["x"].requires_grad_()
    out = call_of("moe_mlp", layer)(x=x)
    assert torch.autograd.grad(x.sum() + 0 * out.detach().sum(), x)[0].eq(1).all()
