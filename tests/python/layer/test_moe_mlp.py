"""moe_mlp against the layer in float64: every activation, layout and gradient, and what it promises besides."""

import subprocess
import sys

import moegemm
import numpy
import pytest
import torch
from counted import Counted
from layer_reference import GATED, UNGATED, Layer, make_layer, reference_gradients, reference_layer, relative_error

# The first product, the activation, the second product, the gradients of both activations and the result are each
# rounded once: five roundings of half an epsilon, which add up as independent errors.
ROUNDINGS = 5**0.5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype == torch.float32 else ROUNDINGS * torch.finfo(dtype).eps / 2


def run(layer: Layer, **options: object) -> torch.Tensor:
    return moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, **layer.options, **options)


def gradients_of(layer: Layer, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    mine = layer.leaves()
    out = run(mine)
    given = mine.given()
    return {"out": out.detach(), **dict(zip(given, torch.autograd.grad(out, list(given.values()), d_out), strict=True))}


def assert_matches_reference(layer: Layer) -> None:
    d_out = torch.randn_like(layer.tensors["x"])
    expected = reference_gradients(layer, d_out)
    got = gradients_of(layer, d_out)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == (layer.tensors["x"] if name == "out" else layer.tensors[name]).dtype
        assert relative_error(value, expected[name]) <= tolerance(layer.tensors["x"].dtype), name
    with torch.no_grad():  # keeps no first product, and may fuse its activation
        assert torch.equal(run(layer), got["out"])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize(
    ("activation", "layout"),
    [(name, layout) for name in GATED for layout in ("concatenated", "interleaved")]
    + [(name, "concatenated") for name in UNGATED],
)
def test_every_activation_and_layout(device, activation, layout, transposed, bias):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert_matches_reference(
        make_layer(device, dtype, activation=activation, layout=layout, transposed=transposed, bias=bias)
    )


def test_the_slope_of_relu_at_zero_is_zero(device):
    """As torch has it: gates that are all zero pass no gradient on."""
    layer = make_layer(device, activation="reglu")
    w_gate_up = layer.tensors["w_gate_up"].detach()
    inner = w_gate_up.size(1) // 2
    w_gate_up[:, :inner] = 0
    layer.tensors["w_gate_up"] = w_gate_up.requires_grad_()
    run(layer).sum().backward()
    assert torch.all(w_gate_up.grad == 0)


@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("tokens", [16, 512, 1024])
def test_a_layer_like_gpt_oss(device, tokens, transposed):
    """On a GPU 4, 128 and 256 rows per expert: each takes other tiles, which all add the second bias themselves."""
    sizes = {"hidden": 1152, "inner": 1088} if device == "cuda" else {"hidden": 72, "inner": 40}
    options = {"activation": "clamped_swiglu", "layout": "interleaved", "transposed": transposed, "bias": True}
    assert_matches_reference(make_layer(device, torch.bfloat16, tokens, experts=16, topk=4, **sizes, **options))


def test_the_second_product_adds_its_bias(device):
    """Before it rounds: not the sum over a token's experts, nor a pass of its own."""
    layer = make_layer(device, bias=True)
    with Counted() as counted:
        run(layer)
    assert counted.names == ["check_layer", "route", "forward", "forward", "combine"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
def test_every_dtype(device, dtype, transposed):
    layer = make_layer(device, dtype, tokens=200, hidden=64, inner=96, transposed=transposed, bias=True)
    assert_matches_reference(layer)


@pytest.mark.parametrize(("hidden", "inner"), [(23, 41), (1, 1), (8, 8), (120, 33)])
def test_odd_sizes(device, hidden, inner):
    assert_matches_reference(make_layer(device, hidden=hidden, inner=inner, bias=True))


@pytest.mark.parametrize("topk", [1, 2, 8])
def test_topk(device, topk):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert_matches_reference(make_layer(device, dtype, experts=9, topk=topk, bias=True))


def test_clamping_takes_alpha_and_limit(device):
    layer = make_layer(device, activation="clamped_swiglu", layout="interleaved", bias=True, alpha=1.3, limit=1.0)
    assert_matches_reference(layer)


def test_router_weights_in_the_layers_dtype(device):
    layer = make_layer(device, torch.bfloat16, weights_dtype=torch.bfloat16, bias=True, tokens=64, hidden=64, inner=64)
    assert_matches_reference(layer)


def test_without_router_weights_slots_are_summed(device):
    layer = make_layer(device, bias=True)
    layer.tensors["router_weights"] = None
    assert_matches_reference(layer)


def test_no_tokens(device):
    layer = make_layer(device, tokens=0, bias=True).leaves()
    out = run(layer)
    out.sum().backward()
    assert out.shape == (0, 24)
    assert all(not t.grad.any() for t in layer.given().values())


def test_leading_dimensions_are_kept(device):
    layer = make_layer(device, tokens=12)
    flat = run(layer)
    shaped = Layer(dict(layer.tensors), layer.expert_ids.view(3, 4, -1), layer.options)
    shaped.tensors["x"] = layer.tensors["x"].view(3, 4, -1)
    shaped.tensors["router_weights"] = layer.tensors["router_weights"].view(3, 4, -1)
    assert torch.equal(run(shaped), flat.view(3, 4, -1))


def test_a_transposed_view_is_used_where_it_is(device, monkeypatch):
    layer = make_layer(device)
    expected = run(layer)
    views = Layer(dict(layer.tensors), layer.expert_ids, {**layer.options, "transposed": True})
    for name in ("w_gate_up", "w_down"):
        views.tensors[name] = layer.tensors[name].transpose(1, 2)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("a copy"))
    assert torch.equal(run(views), expected)


def test_gradients_of_views_have_the_views_shape(device):
    layer = make_layer(device)
    stored = layer.tensors["w_down"].transpose(1, 2).contiguous().requires_grad_()
    layer.tensors["w_down"] = stored.transpose(1, 2)
    run(layer).sum().backward()
    assert stored.grad.shape == stored.shape


def test_the_same_call_gives_the_same_bits(device):
    layer = make_layer(device, torch.bfloat16, tokens=300, hidden=64, inner=64, bias=True)
    d_out = torch.randn_like(layer.tensors["x"])
    first, second = gradients_of(layer, d_out), gradients_of(layer, d_out)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_tokens_bits_do_not_depend_on_the_batch(device):
    layer = make_layer(device, torch.bfloat16, tokens=64, hidden=64, inner=64, bias=True)
    alone = Layer(dict(layer.tensors), layer.expert_ids[5:6], layer.options)
    alone.tensors["x"], alone.tensors["router_weights"] = (layer.tensors[n][5:6] for n in ("x", "router_weights"))
    assert torch.equal(run(alone)[0], run(layer)[5])


def backward_operators(layer: Layer, trained: set[str]) -> list[str]:
    for name, tensor in layer.given().items():
        tensor.requires_grad_(name in trained)
    out = run(layer)
    with Counted() as counted:
        out.sum().backward()
    return counted.names


def test_frozen_experts_compute_no_weight_gradient(device):
    layer = make_layer(device, bias=True).leaves()
    names = backward_operators(layer, {"x", "router_weights"})
    assert "dw" not in names
    assert "expert_sums" not in names
    assert layer.tensors["w_down"].grad is None


def test_only_what_is_needed_is_computed(device):
    assert backward_operators(make_layer(device), {"x", "w_gate_up", "w_down", "router_weights"}).count("dw") == 2
    assert backward_operators(make_layer(device), {"w_down"}).count("dw") == 1
    assert "combine" not in backward_operators(make_layer(device), {"w_gate_up", "w_down"})
    assert backward_operators(make_layer(device, bias=True), {"down_bias"}) == ["expert_sums"]


def test_what_is_kept_for_the_backward(device):
    """x, the first product and the routing, besides what the caller holds anyway."""
    layer = make_layer(device, torch.bfloat16, tokens=64, hidden=64, inner=96, experts=4, topk=2).leaves()
    own = {t.data_ptr() for t in layer.given().values()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run(layer)
    assert layer.tensors["x"].data_ptr() in kept
    rows = 64 * 2
    assert sum(size for pointer, size in kept.items() if pointer not in own) == rows * 2 * 96 * 2 + 4 * 4 + rows * 4


@pytest.mark.parametrize(("trained", "unread"), [("x", "x"), ("w_gate_up", "w_gate_up"), ("w_down", "w_gate_up")])
def test_an_operand_that_no_wanted_gradient_reads_is_not_kept(device, trained, unread):
    layer = make_layer(device)
    layer.tensors[trained].requires_grad_()
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run(layer)
    assert kept
    assert layer.tensors[unread].data_ptr() not in kept


def test_expanded_gradients(device):
    layer = make_layer(device)
    d_out = torch.ones((), device=device).expand(13, 24)
    got, expected = gradients_of(layer, d_out), gradients_of(layer, d_out.contiguous())
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_autocast(device):
    layer = make_layer(device, bias=True, tokens=64, hidden=64, inner=64).leaves()
    with torch.autocast(device, torch.bfloat16):
        out = run(layer)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    exact = reference_gradients(layer, torch.ones_like(layer.tensors["x"]))
    for name, tensor in layer.given().items():
        assert tensor.grad.dtype == torch.float32
        assert relative_error(tensor.grad, exact[name]) <= 2 * tolerance(torch.bfloat16), name


@pytest.mark.smoke
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
def test_compiles_as_one_graph(device, transposed):
    torch._dynamo.reset()
    layer = make_layer(device, torch.bfloat16, bias=True, transposed=transposed, activation="clamped_swiglu")
    eager, compiled = layer.leaves(), layer.leaves()

    def loss(tensors: dict, ids: torch.Tensor) -> torch.Tensor:
        return (moegemm.moe_mlp(**tensors, expert_ids=ids, **layer.options).float() * 0.5).square().sum()

    expected = loss(eager.tensors, layer.expert_ids)
    expected.backward()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled.tensors, layer.expert_ids)
    got.backward()
    assert torch.equal(got, expected)
    for name, tensor in compiled.given().items():
        assert torch.equal(tensor.grad, eager.tensors[name].grad), name


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_inference_compiles_as_one_graph(device, layout):
    torch._dynamo.reset()
    layer = make_layer(device, torch.bfloat16, bias=True, layout=layout)

    def infer(tensors: dict, ids: torch.Tensor) -> torch.Tensor:
        return moegemm.moe_mlp(**tensors, expert_ids=ids, **layer.options) * 0.5

    with torch.inference_mode():
        expected = infer(layer.tensors, layer.expert_ids)
        got = torch.compile(infer, fullgraph=True, backend="aot_eager")(layer.tensors, layer.expert_ids)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("view", [False, True], ids=["stored", "transposed view"])
@pytest.mark.parametrize("marked", [False, True])
def test_accumulate_adds_to_main_grads(device, marked, view):
    layer = make_layer(device, torch.bfloat16)
    leaves = layer.leaves()
    out = run(leaves)
    names = ("w_gate_up", "w_down")
    expected = torch.autograd.grad(out.float().square().sum(), [leaves.tensors[name] for name in names])
    again = layer.leaves()
    for name in names:
        weight = again.tensors[name]
        if view:
            weight = weight.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
            again.tensors[name] = weight
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32, requires_grad=False)
        if marked:
            weight.grad_added_to_main_grad = False
    for _ in range(2):
        run(again, accumulate=True).float().square().sum().backward()
    for name, gradient in zip(names, expected, strict=True):
        weight = again.tensors[name]
        assert relative_error(weight.main_grad - 1, 2 * gradient.double()) <= tolerance(torch.bfloat16)
        assert (weight.grad is not None) == marked
        if marked:
            assert weight.grad_added_to_main_grad
            assert not weight.grad.any()


def test_accumulate_needs_main_grads():
    layer = make_layer("cpu", torch.float32)
    with pytest.raises(ValueError, match=r"w_gate_up.main_grad is None; accumulate=True needs a fp32 or bf16 tensor"):
        run(layer.leaves(), accumulate=True)


def test_frozen_weights_and_inference_need_no_main_grads():
    layer = make_layer("cpu", torch.float32)
    leaves = layer.leaves()
    expected = run(leaves)
    with torch.no_grad():
        assert torch.equal(run(leaves, accumulate=True), expected)
    leaves.tensors["w_gate_up"].requires_grad_(False)
    w_down = leaves.tensors["w_down"]
    w_down.main_grad = torch.zeros_like(w_down, requires_grad=False)
    run(leaves, accumulate=True).sum().backward()
    assert w_down.main_grad.any()
    assert leaves.tensors["w_gate_up"].grad is None


def test_checkpointing_gives_the_same_gradients(device):
    layer = make_layer(device, bias=True)
    plain, checkpointed = layer.leaves(), layer.leaves()
    run(plain).sum().backward()
    torch.utils.checkpoint.checkpoint(lambda: run(checkpointed), use_reentrant=False).sum().backward()
    for name, tensor in checkpointed.given().items():
        assert torch.equal(tensor.grad, plain.tensors[name].grad), name


def test_a_cuda_graph_replays_with_other_routing():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    layer = make_layer("cuda", torch.bfloat16, tokens=64, hidden=64, inner=64, bias=True)
    run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(layer)
    layer.expert_ids.copy_(torch.randint(-1, 6, layer.expert_ids.shape))
    layer.tensors["x"].normal_()
    graph.replay()
    torch.cuda.synchronize()
    exact = reference_layer(layer.leaves(torch.float64))
    assert relative_error(out, exact) <= tolerance(torch.bfloat16)


FRESH_BACKWARD = """
import torch, moegemm
x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
gate_up, down = (torch.randn(4, *s, device="cuda", dtype=torch.bfloat16) for s in ((128, 64), (64, 64)))
weights, ids = torch.rand(64, 4, device="cuda").topk(2)
out = moegemm.moe_mlp(x, gate_up, down, ids, weights)
out.backward(torch.ones_like(out))
assert x.grad.isfinite().all()
"""


def test_a_product_may_be_the_first_thing_that_a_backward_thread_runs():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    subprocess.run([sys.executable, "-c", FRESH_BACKWARD], check=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation": "tanh"}, ValueError, "activation is 'tanh'; accepted are swiglu"),
        ({"layout": "rows"}, ValueError, "layout is 'rows'"),
        ({"layout": "none"}, ValueError, "layout is 'none'; accepted are 'concatenated' and 'interleaved'"),
        ({"x": None}, TypeError, "x is None"),
        ({"x": torch.randn(13, 23)}, ValueError, r"w_down is fp32\[6, 24, 40\].*its shape must be \[E, H, I\]"),
        ({"w_gate_up": torch.randn(6, 40, 24)}, ValueError, r"w_gate_up is fp32\[6, 40, 24\]"),
        ({"w_down": torch.randn(24, 40)}, ValueError, r"w_down is fp32\[24, 40\].*must be \[E, H, I\]"),
        ({"gate_up_bias": torch.randn(6, 40)}, ValueError, "gate_up_bias"),
        ({"router_weights": torch.rand(13, 2)}, ValueError, "router_weights"),
        (
            {"router_weights": torch.ones(13, 3, dtype=torch.int64)},
            TypeError,
            "router_weights has dtype torch.int64; a floating dtype is accepted: torch.float32 and that of the rows",
        ),
        ({"expert_ids": torch.zeros(12, 3, dtype=torch.int64)}, ValueError, "expert_ids"),
        ({"expert_ids": torch.zeros(13, 3)}, TypeError, "expert_ids has dtype fp32"),
        ({"x": torch.randn(13, 24).double()}, TypeError, "x has dtype Double; accepted are bf16"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x has no dimensions; its shape must be \[..., H\]"),
        (
            {"x": torch.randn(13, 24).bfloat16()},
            TypeError,
            "w_gate_up has dtype fp32; it must have bf16, the dtype of x",
        ),
        ({"w_down": torch.randn(6, 24, 40).half()}, TypeError, "w_down has dtype fp16.*the dtype of x"),
        ({"gate_up_bias": torch.randn(6, 80).half()}, TypeError, "gate_up_bias has dtype fp16"),
        ({"down_bias": torch.randn(6, 24).half()}, TypeError, "down_bias has dtype fp16"),
        (
            {"expert_ids": torch.zeros(13, 0, dtype=torch.int64), "router_weights": None},
            ValueError,
            r"expert_ids is int64\[13, 0\] on cpu; topk, its last dimension, must be at least 1",
        ),
        (
            {"x": torch.randn(13, 0), "w_gate_up": torch.randn(6, 80, 0), "w_down": torch.randn(6, 0, 40)},
            ValueError,
            r"x is fp32\[13, 0\] on cpu; H must be at least 1",
        ),
        ({"w_down": torch.randn(6, 24, 0), "w_gate_up": torch.randn(6, 0, 24)}, ValueError, "I must be at least 1"),
        ({"w_down": torch.randn(0, 24, 40), "w_gate_up": torch.randn(0, 80, 24)}, ValueError, "E must be at least 1"),
        (
            {"x": numpy.zeros((13, 24))},
            TypeError,
            r"^x is an array of shape \[13, 24\] of type ndarray; a torch.Tensor",
        ),
        ({"w_down": [[1.0] * 5000] * 5000}, TypeError, r"^w_down is .{,80} of type list; a torch.Tensor is accepted$"),
        ({"activation": ["swiglu"]}, ValueError, r"activation is \['swiglu'\]; accepted are"),
        ({"limit": -1.0}, ValueError, "limit is -1"),
        ({"activation": "geglu", "alpha": 2.0}, ValueError, "alpha is 2.0"),
        (
            {"activation": "silu", "up_offset": 1.0},
            ValueError,
            "up_offset is 1.0 with activation 'silu', which has no up",
        ),
    ],
)
def test_refusals_name_the_argument(changes, error, message):
    layer = make_layer()
    arguments = {**layer.tensors, "expert_ids": layer.expert_ids, **layer.options, **changes}
    with pytest.raises(error, match=message):
        moegemm.moe_mlp(**arguments)
