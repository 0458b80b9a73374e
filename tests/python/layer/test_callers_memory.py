"""Memory of the caller's for a layer's result and its gradient: which is taken, and what becomes of it."""

import re
import warnings

import moegemm
import pytest
import torch
from expert_rows import make_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_leaves_the_callers_memory_alone(device, reentrant, tokens):
    w_gate_up, w_down = torch.randn(3, 12, 8, device=device, requires_grad=True), torch.randn(3, 8, 6, device=device)
    ids, sizes = torch.randint(3, (10, 1), device=device), torch.tensor([3, 2, 5], device=device)

    def layer(x, **memory):
        if tokens:
            return moegemm.moe_mlp(x, w_gate_up, w_down, ids, None, **memory)
        return moegemm.experts_mlp(x, w_gate_up, w_down, sizes, **memory)

    leaves = [torch.randn(10, 8, device=device, requires_grad=True), w_gate_up]
    out = torch.empty(10, 8, device=device)
    expected = torch.autograd.grad(layer(leaves[0]).square().sum(), leaves)
    for _ in range(2):
        got = checkpoint(lambda x: layer(x, out=out), leaves[0], use_reentrant=reentrant)
        assert got.data_ptr() == out.data_ptr()
        assert out.grad_fn is None
        assert not out.requires_grad
        got.square().sum().backward()
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert torch.equal(leaf.grad, gradient)
            leaf.grad = None


def test_compiled_inference_writes_to_the_callers_memory(device):
    tensors, options = make_rows(device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda out: moegemm.experts_mlp(**tensors, **options, out=out), backend="aot_eager", fullgraph=True
    )
    out = torch.empty_like(tensors["rows"])
    with torch.no_grad():
        got = compiled(out)
    assert torch.equal(out, moegemm.experts_mlp(**tensors, **options))
    assert torch.equal(got, out)


@pytest.mark.parametrize("make", [
    lambda: torch.empty(3, 4, 8)[:, :1],
    lambda: torch.empty(3, 1, 10)[:, :, :8],
    lambda: torch.empty(1, 3, 8).transpose(0, 1),
], ids=["first of some", "padded", "turned"])  # fmt: skip
def test_strides_of_dimensions_of_one_say_nothing(device, make):
    out, rows, sizes = (
        make().to(device),
        torch.randn(3, 1, 8, device=device),
        torch.ones(3, dtype=torch.int64, device=device),
    )
    weights = torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device)
    got = moegemm.experts_mlp(rows, *weights, sizes, out=out)
    assert got.stride() == out.stride()
    assert torch.equal(out, moegemm.experts_mlp(rows, *weights, sizes))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_memory_for_no_rows_has_any_strides(device, shape):
    weights = torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device)
    sizes = torch.zeros(3, dtype=torch.int64, device=device)
    out = torch.empty(shape[::-1], device=device).permute(*reversed(range(len(shape))))
    assert moegemm.experts_mlp(torch.empty(shape, device=device), *weights, sizes, out=out).shape == shape


@pytest.mark.parametrize("name", ["out", "grad_rows_out"])
@pytest.mark.parametrize("part", ["values", "scales"])
@pytest.mark.parametrize("which", [0, 1, "up"])
def test_memory_of_a_quantised_weight_is_refused(which, part, name):
    first, second = (moegemm.quantize(torch.randn(3, n, k), "mxfp4") for n, k in ((128, 64), (64, 64)))
    halves = [moegemm.quantize(torch.randn(3, 64, 64), "mxfp4") for _ in range(2)]
    weights = [halves if which == "up" else first, second]
    owner, argument = (halves[1], "w_gate_up[1]") if which == "up" else (weights[which], ("w_gate_up", "w_down")[which])
    memory = getattr(owner, part).data
    before = memory.clone()
    rows = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=name != "out")
    buffer = memory.view(torch.uint8).flatten()[: rows.nbytes].view(torch.bfloat16).view(3, 64)
    with pytest.raises(ValueError, match=f"{name} shares memory with {re.escape(argument)}; it must have its own"):
        moegemm.experts_mlp(rows, *weights, torch.tensor([1, 1, 1]), **{name: buffer})
    assert torch.equal(memory, before)


def test_memory_among_the_columns_of_an_input_is_refused(device):
    wide, w_gate_up, w_down = (torch.randn(shape, device=device) for shape in ((6, 32), (3, 12, 8), (3, 8, 6)))
    sizes = torch.tensor([3, 0, 3], device=device)
    with pytest.raises(ValueError, match="out shares memory with rows; it must have its own"):
        moegemm.experts_mlp(wide[:, :16:2], w_gate_up, w_down, sizes, out=wide[:, 8:16])
    moegemm.experts_mlp(wide[:, :8], w_gate_up, w_down, sizes, out=wide[:, 8:16])


def test_memory_of_fake_tensors_is_asked_for_no_address():
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        rows, out = torch.empty(6, 8, requires_grad=True), torch.empty(6, 8)
        weights, sizes = (torch.empty(3, 12, 8), torch.empty(3, 8, 6)), torch.empty(3, dtype=torch.int64)
        moegemm.experts_mlp(rows, *weights, sizes, out=out, grad_rows_out=torch.empty(6, 8)).sum().backward()
        assert rows.grad.shape == rows.shape


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("shared", [slice(0, 10), slice(4, 14)], ids=["all of it", "some of it"])
def test_memory_of_the_incoming_gradient_is_refused(device, tokens, shared):
    """The gradient of the down bias reads it after that of the rows is written, a queue later still."""
    weights = torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device, requires_grad=True)
    ids, sizes = torch.randint(3, (10, 1), device=device), torch.tensor([3, 2, 5], device=device)
    memory = torch.randn(14, 8, device=device)
    d_out, buffer = memory[:10], memory[shared]
    before = memory.clone()
    for options in ({}, {"weight_gradients": moegemm.WeightGradients()}):
        x = torch.randn(10, 8, device=device, requires_grad=True)
        if tokens:
            name, out = "grad_x_out", moegemm.moe_mlp(x, *weights, ids, None, **options, grad_x_out=buffer)
        else:
            name, out = "grad_rows_out", moegemm.experts_mlp(x, *weights, sizes, **options, grad_rows_out=buffer)
        with pytest.raises(ValueError, match=f"^{name} shares memory with the gradient of the result; it must have"):
            out.backward(d_out)
        assert torch.equal(memory, before)


def test_memory_that_is_not_written_may_be_the_incoming_gradients(device):
    weights = torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device, requires_grad=True)
    d_out, sizes = torch.randn(10, 8, device=device), torch.tensor([3, 2, 5], device=device)
    out = moegemm.experts_mlp(torch.randn(10, 8, device=device), *weights, sizes, grad_rows_out=d_out)
    out.backward(d_out)
    assert weights[1].grad.isfinite().all()


@pytest.mark.parametrize("down_bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_autograd_notices_that_memory_it_saved_was_written(device, tokens, weighted, down_bias):
    w_gate_up, w_down = torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device)
    bias = torch.randn(3, 8, device=device) if down_bias else None
    x, out = torch.randn(10, 8, device=device, requires_grad=True), torch.ones(10, 8, device=device)
    weights = torch.rand(10, 1, device=device) if weighted else None
    product = x * out
    if tokens:
        ids = torch.randint(3, (10, 1), device=device)
        moegemm.moe_mlp(x, w_gate_up, w_down, ids, weights, down_bias=bias, out=out)
    else:
        sizes, options = torch.tensor([3, 2, 5], device=device), {"down_bias": bias, "out": out}
        row_weights = None if weights is None else weights.flatten()
        moegemm.experts_mlp(x, w_gate_up, w_down, sizes, row_weights=row_weights, **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
