"""main_grad as Megatron-Core and Megatron-FSDP hang it on a parameter."""

import moegemm
import pytest
import torch
from conftest import make_case


def parameter(case) -> torch.Tensor:
    return case.W.clone().requires_grad_()


def plain_gradient(case, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """dW as it is before it is rounded to `dtype`."""
    dY = torch.ones(case.X.size(0), case.W.size(1), device=case.X.device, dtype=case.X.dtype)
    return moegemm.grouped_gemm_dW(case.X, dY, case.m_sizes, None, 1, out_dtype=dtype)


def run(case, W: torch.Tensor) -> None:
    moegemm.grouped_gemm(case.X, W, case.m_sizes, 1, accumulate=True).sum().backward()


@pytest.mark.parametrize("flat", [False, True], ids=["stacked", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_buffer_is_added_to_in_fp32_and_rounded_once(device, dtype, flat):
    case = make_case(device, dtype=dtype)
    W = parameter(case)
    if flat:
        W = W.detach().flatten(0, 1).requires_grad_()
    before = torch.randn_like(W, dtype=torch.bfloat16, requires_grad=False)
    W.main_grad = before.clone()
    run(case, W)
    exact = plain_gradient(case).view(W.shape)
    assert torch.equal(W.main_grad, (before.float() + exact).bfloat16())
    assert W.grad is None
    assert W.main_grad._version == 1


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwrite_main_grad_writes_instead_of_adding(device, dtype, buffer_dtype):
    case = make_case(device, dtype=dtype)
    W = parameter(case)
    W.main_grad = torch.full(W.shape, float("nan"), device=device, dtype=buffer_dtype)
    W.overwrite_main_grad = True
    run(case, W)
    assert torch.equal(W.main_grad, plain_gradient(case).to(buffer_dtype))
    W.overwrite_main_grad = False
    run(case, W)
    assert torch.equal(W.main_grad, (plain_gradient(case).to(buffer_dtype) + plain_gradient(case)).to(buffer_dtype))


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
def test_get_main_grad_is_asked_in_the_backward(device, buffer_dtype):
    """Megatron-FSDP allocates the buffer then."""
    case = make_case(device)
    W = parameter(case)
    buffer = torch.zeros(W.shape, device=device, dtype=buffer_dtype)
    asked = []

    def get_main_grad():
        asked.append(True)
        return buffer

    W.get_main_grad = get_main_grad
    Y = moegemm.grouped_gemm(case.X, W, case.m_sizes, 1, accumulate=True)
    assert not asked
    Y.sum().backward()
    assert len(asked) == 1
    assert torch.equal(buffer, plain_gradient(case).to(buffer_dtype))


@pytest.mark.parametrize("zero_out_wgrad", [False, True])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
def test_the_flag_is_set_and_the_hook_sees_zeros(device, buffer_dtype, zero_out_wgrad):
    case = make_case(device)
    W = parameter(case)
    W.main_grad = torch.zeros(W.shape, device=device, dtype=buffer_dtype)
    W.grad_added_to_main_grad = False
    W.zero_out_wgrad = zero_out_wgrad
    seen = []
    W.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().max().item()))
    run(case, W)
    assert W.grad_added_to_main_grad
    assert seen == [0.0]


def layer(device: str, dtype: torch.dtype, view: bool):
    x, ids = torch.randn(7, 8, device=device, dtype=dtype), torch.randint(3, (7, 2), device=device)
    weights = [torch.randn(3, 12, 8, device=device, dtype=dtype), torch.randn(3, 8, 6, device=device, dtype=dtype)]
    if view:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    return x, ids, [w.requires_grad_() for w in weights]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["add", "overwrite", "get"])
def test_every_form_of_a_layers_weights(device, way, buffer_dtype, view):
    x, ids, weights = layer(device, torch.float32, view)
    moegemm.moe_mlp(x, *weights, ids, None).sum().backward()
    expected = [w.grad.clone() for w in weights]
    buffers = [torch.ones(w.shape, device=device, dtype=buffer_dtype) for w in weights]
    for w, buffer in zip(weights, buffers, strict=True):
        w.grad = None
        w.grad_added_to_main_grad = False
        if way == "get":
            w.get_main_grad = lambda buffer=buffer: buffer
        else:
            w.main_grad = buffer
            w.overwrite_main_grad = way == "overwrite"
    moegemm.moe_mlp(x, *weights, ids, None, accumulate=True).sum().backward()
    for w, buffer, gradient in zip(weights, buffers, expected, strict=True):
        wanted = gradient if way == "overwrite" else 1 + gradient
        assert torch.allclose(buffer.float(), wanted, rtol=2**-8 if buffer_dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert w.grad_added_to_main_grad
        assert not w.grad.any()


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (None, ValueError, r"W.get_main_grad\(\) is None; accumulate=True needs a fp32 or bf16 tensor of W's shape"),
        (torch.zeros(5, 24, 40, dtype=torch.float16), TypeError, "dtype torch.float16; .*float32 or torch.bfloat16"),
        (torch.zeros(5, 24, 41), ValueError, r"is \[5, 24, 41\] on cpu; it must be \[5, 24, 40\]"),
    ],
)
def test_a_buffer_that_does_not_fit_is_named(buffer, error, message):
    case = make_case("cpu")
    W = parameter(case)
    W.get_main_grad = lambda: buffer
    with pytest.raises(error, match=message):
        run(case, W)
    del W.get_main_grad
    W.main_grad = buffer
    with pytest.raises(error, match=message.replace(r"get_main_grad\(\)", "main_grad")):
        moegemm.grouped_gemm(case.X, W, case.m_sizes, 1, accumulate=True)


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["add", "overwrite", "get"])
def test_compiled_backwards_write_to_the_same_buffers(device, way, buffer_dtype):
    case = make_case(device)
    W = parameter(case)
    buffer = torch.zeros(W.shape, device=device, dtype=buffer_dtype)
    if way == "get":
        W.get_main_grad = lambda: buffer
    else:
        W.main_grad, W.overwrite_main_grad = buffer, way == "overwrite"
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda X, W: moegemm.grouped_gemm(X, W, case.m_sizes, 1, accumulate=True).sum(),
        backend="aot_eager",
        fullgraph=True,
    )
    compiled(case.X, W).backward()
    assert torch.equal(buffer, plain_gradient(case).to(buffer_dtype))


def test_a_weight_without_gradient_needs_no_buffer(device):
    case = make_case(device)
    expected = moegemm.grouped_gemm(case.X, case.W, case.m_sizes, 1)
    assert torch.equal(moegemm.grouped_gemm(case.X, case.W, case.m_sizes, 1, accumulate=True), expected)
    W = parameter(case)
    with torch.no_grad():
        assert torch.equal(moegemm.grouped_gemm(case.X, W, case.m_sizes, 1, accumulate=True), expected)
    X = case.X.clone().requires_grad_()
    moegemm.grouped_gemm(X, W, case.m_sizes, 1, accumulate=True, dX_only=True).sum().backward()
    assert X.grad is not None
    assert W.grad is None
