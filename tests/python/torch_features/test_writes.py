"""out= and main_grad as autograd sees them: written, counted, and without a gradient of their own."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from raw_calls import RAW, raw_call


@pytest.mark.parametrize("name", RAW)
def test_writing_to_out_is_counted(device, name):
    case = make_case(device)
    out = raw_call(name, case)
    for _ in range(2):
        before = out._version
        raw_call(name, case, out=out)
        assert out._version == before + 1


@pytest.mark.parametrize("name", RAW)
def test_overwriting_a_saved_tensor_through_out_is_noticed(device, name):
    case = make_case(device)
    out = raw_call(name, case)
    scale = torch.ones_like(out, requires_grad=True)
    loss = (scale * out).sum()
    raw_call(name, case, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", RAW)
def test_out_that_requires_grad_is_refused_as_torch_mm_does(device, name):
    case = make_case(device)
    out = raw_call(name, case).requires_grad_()
    before = out.detach().clone()
    with pytest.raises(RuntimeError, match="out requires grad"):
        raw_call(name, case, out=out.detach().fill_(0).requires_grad_())
    with pytest.raises(RuntimeError, match="requires grad"):
        torch.mm(
            torch.ones(2, 2, device=device), torch.ones(2, 2, device=device), out=torch.ones(2, 2).requires_grad_()
        )
    with torch.no_grad():
        assert raw_call(name, case, out=out) is out
    assert torch.equal(out, before)
    with torch.inference_mode():
        inference = torch.empty_like(before)
        assert torch.equal(raw_call(name, case, out=inference), before)


@pytest.mark.parametrize(("name", "argument"), zip(RAW, ["X", "W", "X"], strict=True))
def test_inputs_that_require_grad_are_refused_with_out_as_torch_mm_does(device, name, argument):
    case = make_case(device)
    out = raw_call(name, case)
    getattr(case, argument).requires_grad_()
    with pytest.raises(RuntimeError, match=f"{argument} requires grad"):
        raw_call(name, case, out=out)
    with torch.no_grad():
        assert raw_call(name, case, out=out) is out
    raw_call(name, case)  # without out=, the raw functions have no gradient either, and say nothing


@pytest.mark.parametrize("name", RAW)
def test_compiled_writes_to_out_are_counted(device, name):
    case = make_case(device)
    out = raw_call(name, case)
    expected, before = out.clone(), out._version
    torch._dynamo.reset()
    torch.compile(lambda o: raw_call(name, case, out=o), backend="aot_eager", fullgraph=True)(out.zero_())
    assert torch.equal(out, expected)
    assert out._version > before + 1


def test_adding_to_main_grad_is_counted(device):
    case = make_case(device, "permute_x")
    W = case.W.requires_grad_()
    W.main_grad = torch.zeros_like(W, requires_grad=False)
    scale = torch.ones_like(W.main_grad, requires_grad=True)
    loss = (scale * W.main_grad).sum()
    moegemm.grouped_gemm(**case.arguments(), accumulate=True).sum().backward()
    assert W.main_grad._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("view", [False, True])
def test_the_layers_main_grads_are_counted(device, view):
    x, ids = torch.randn(5, 8, device=device), torch.randint(3, (5, 2), device=device)
    weights = [torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device)]
    if view:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    for w in weights:
        w.requires_grad_().main_grad = torch.zeros_like(w, requires_grad=False)
    moegemm.moe_mlp(x, *weights, ids, None, accumulate=True).sum().backward()
    assert [w.main_grad._version for w in weights] == [1, 1]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_out_with_a_pitch_gets_the_same_bits_and_nothing_around_them(device, flags, name, dtype):
    case = make_case(device, flags, dtype, unrouted=0 if flags == "permute_x" else 3)
    expected = raw_call(name, case)
    columns = expected.size(-1)
    flat = expected.view(-1, columns)
    for left, right in ((0, 8), (8, 0), (3, 5)):
        wide = torch.full((len(flat), left + columns + right), float("nan"), device=device, dtype=dtype)
        out = wide[:, left : left + columns]
        if expected.dim() == 3:
            out = out.unflatten(0, expected.shape[:2])
        assert raw_call(name, case, out=out) is out
        assert torch.equal(out, expected)
        wide[:, left : left + columns] = float("nan")
        assert wide.isnan().all()


@pytest.mark.parametrize("view", ["every second expert", "every second column", "transposed"])
def test_an_out_that_cannot_be_walked_is_refused(device, view):
    case = make_case(device)
    dW = raw_call("grouped_gemm_dW", case)
    wide = torch.zeros(*(2 * n for n in dW.shape), device=device)
    E, N, K = dW.shape
    out = {
        "every second expert": wide.view(-1, N, K)[: 2 * E : 2],
        "every second column": wide[:E, :N, : 2 * K : 2],
        "transposed": wide.view(-1, K, N)[:E].transpose(1, 2),
    }[view]
    with pytest.raises(ValueError, match=r"out is .* strides that overlap or skip"):
        raw_call("grouped_gemm_dW", case, out=out)
    assert not wide.any()
