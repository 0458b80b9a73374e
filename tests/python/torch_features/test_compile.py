"""torch.compile(fullgraph=True): the same results as eager, one graph for all token counts."""

import moegemm
import pytest
import torch
import torch._dynamo.testing
from conftest import FLAGS, make_case
from moegemm.operators import shortcuts


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def train_step(arguments: dict) -> torch.Tensor:
    Y = moegemm.grouped_gemm(**arguments)
    return (Y.float() * 0.5).square().sum()


def leaves(case) -> dict:
    named = case.arguments()
    for name in ("X", "W", "topk_weights"):
        if named[name] is not None:
            named[name] = named[name].detach().clone().requires_grad_()
    return named


def gradients(arguments: dict) -> list:
    return [arguments[name].grad for name in ("X", "W", "topk_weights") if arguments[name] is not None]


@pytest.mark.smoke
@pytest.mark.parametrize("flags", FLAGS)
def test_forward_and_backward_match_eager(device, flags):
    case = make_case(device, flags, torch.bfloat16)
    eager, compiled = leaves(case), leaves(case)
    loss = train_step(eager)
    loss.backward()
    compiled_loss = torch.compile(train_step, fullgraph=True, backend="aot_eager")(compiled)
    compiled_loss.backward()
    assert torch.equal(loss, compiled_loss)
    for mine, theirs in zip(gradients(compiled), gradients(eager), strict=True):
        assert torch.equal(mine, theirs)


def test_a_whole_layer_compiles_with_inductor(device):
    E, K, N, topk = 4, 32, 48, 2
    W1 = (torch.randn(E, N, K, device=device) * K**-0.5).requires_grad_()
    W2 = (torch.randn(E, K, N, device=device) * N**-0.5).requires_grad_()

    def layer(x, logits):
        weights, ids = logits.softmax(-1).topk(topk)
        m_sizes, gather_indices = moegemm.route(ids, E)
        h = moegemm.grouped_gemm(x, W1, m_sizes, topk, gather_indices, permute_x=True)
        y = moegemm.grouped_gemm(
            torch.nn.functional.silu(h), W2, m_sizes, topk, gather_indices,
            permute_y=True, topk_weights=weights, fuse_mul_post=True, is_first_gemm=False,
        )  # fmt: skip
        return moegemm.combine(y, topk=topk)

    compiled = torch.compile(layer, fullgraph=True, backend="inductor")
    x = torch.randn(10, K, device=device, requires_grad=True)
    logits = torch.randn(10, E, device=device, requires_grad=True)
    results = []
    for run in (layer, compiled):
        out = run(x, logits)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, logits, W1, W2])])
    for mine, theirs in zip(*results, strict=True):
        # Inductor's silu and softmax round differently.
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", FLAGS)
def test_token_counts_do_not_recompile(device, flags):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(train_step, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (13, 17, 4, 29):
        arguments = leaves(make_case(device, flags, tokens=tokens))
        compiled(arguments).backward()
    assert counter.frame_count == 1


@pytest.mark.smoke
def test_token_counts_become_dynamic_by_themselves(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(train_step, fullgraph=True, backend=counter)
    for tokens in (13, 17, 4, 29, 31):
        compiled(leaves(make_case(device, "permute_x", tokens=tokens))).backward()
    assert counter.frame_count == 2


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_one_graph_serves_the_token_counts_of_a_layer(device, activation):
    w_gate_up, w_down = torch.randn(4, 24, 16, device=device), torch.randn(4, 16, 12, device=device)

    def layer(x, ids, sizes):
        rows = moegemm.experts_mlp(x, w_gate_up, w_down, sizes, activation=activation)
        return moegemm.moe_mlp(rows, w_gate_up, w_down, ids, None, activation, max_rows=x.size(0))

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (13, 17, 5):
        x, ids = torch.randn(tokens, 16, device=device), torch.randint(-1, 5, (tokens, 2), device=device)
        sizes = torch.tensor([2, 0, 3, 0], device=device)
        assert torch.equal(compiled(x, ids, sizes), layer(x, ids, sizes))
    assert counter.frame_count == 1


@pytest.mark.parametrize("whole", [True, False], ids=["moe_mlp", "its parts"])
def test_one_graph_serves_tokens_and_capacities_that_only_the_device_knows(device, whole):
    E, K, N, topk = 4, 16, 12, 2

    def layer(x, w1, w2, weights, ids, kept):
        x, weights, ids = x[kept], weights[kept], ids[kept]
        rows = ((ids >= 0) & (ids < E)).sum().item()
        if whole:
            return moegemm.moe_mlp(x, w1, w2, ids, weights, "relu", max_rows=rows)
        m_sizes, indices, positions = moegemm.route(ids, E, max_rows=rows, return_inverse=True)
        h = moegemm.grouped_gemm(x, w1, m_sizes, topk, indices, permute_x=True).relu()
        return moegemm.combine(moegemm.grouped_gemm(h, w2, m_sizes, 1), weights, positions=positions)

    def results(call, ids, kept):
        torch.manual_seed(1)
        shapes = (9, K), (E, N, K), (E, K, N), (9, topk)
        leaves = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
        out = call(*leaves, ids, kept)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for share, low in ((0.7, -1), (0.3, -3), (1.0, -9), (0.0, 0)):
            ids, kept = torch.randint(low, E + 1, (9, topk), device=device), torch.rand(9, device=device) < share
            for got, expected in zip(results(compiled, ids, kept), results(layer, ids, kept), strict=True):
                assert torch.equal(got, expected)
    assert counter.frame_count == 1


def test_compiled_inference(device):
    case = make_case(device, "permute_x", torch.bfloat16)
    with torch.no_grad():
        expected = moegemm.grouped_gemm(**case.arguments())
        compiled = torch.compile(lambda a: moegemm.grouped_gemm(**a), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(case.arguments()), expected)


def test_manual_configs_compile(device):
    case = make_case(device, dtype=torch.bfloat16)
    config = moegemm.KernelConfigForward(BLOCK_SIZE_M=44)
    eager, compiled = leaves(case), leaves(case)
    train_step(eager).backward()
    step = torch.compile(train_step, fullgraph=True, backend="aot_eager")
    step({**compiled, "kernel_config_fwd": config}).backward()
    for mine, theirs in zip(gradients(compiled), gradients(eager), strict=True):
        assert torch.equal(mine, theirs)


def test_autocast_compiles(device):
    def step(arguments):
        with torch.autocast(device, dtype=torch.bfloat16):
            return moegemm.grouped_gemm(**arguments)

    arguments = leaves(make_case(device, "permute_x"))
    expected = step(arguments)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(arguments)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected)


def test_the_tf32_setting_can_be_traced():
    """Whichever of torch's two interfaces it was made with."""
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for setting in ("tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = setting
            torch._dynamo.reset()
            traced = torch.compile(
                lambda x: x + int(shortcuts.cuda_matmul_uses_tf32()), fullgraph=True, backend="eager"
            )
            assert traced(torch.zeros(())).item() == (setting == "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_either_tf32_setting_is_followed(monkeypatch):
    """The older interface and the newer one, one after the other."""
    monkeypatch.setattr(shortcuts, "_read_older_setting", torch._C._get_cublas_allow_tf32)
    matmul = torch.backends.cuda.matmul
    precision, allowed = matmul.fp32_precision, shortcuts.cuda_matmul_uses_tf32()
    try:
        for allow in (True, False):
            matmul.allow_tf32 = allow
            assert shortcuts.cuda_matmul_uses_tf32() == allow
        for setting in ("tf32", "ieee", "tf32"):
            matmul.fp32_precision = setting
            assert shortcuts.cuda_matmul_uses_tf32() == (setting == "tf32")
        matmul.allow_tf32 = False
        assert not shortcuts.cuda_matmul_uses_tf32()
    finally:
        matmul.allow_tf32 = allowed
        matmul.fp32_precision = precision


@pytest.mark.smoke
def test_accumulation_into_main_grad_compiles(device):
    arguments = leaves(make_case(device, "permute_x", torch.bfloat16))
    W = arguments["W"]
    results = []
    for backend in ("eager", "aot_eager"):
        W.main_grad = torch.zeros(W.shape, device=device)
        torch.compile(train_step, fullgraph=True, backend=backend)({**arguments, "accumulate": True}).backward()
        results.append(W.main_grad)
    assert W.grad is None
    assert results[0].any()
    assert torch.equal(*results)


class _Product(torch.nn.Module):
    def forward(self, X: torch.Tensor, W: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
        return moegemm.grouped_gemm(X, W, m_sizes, 1)


def test_an_exported_product_runs_under_autocast_too(device):
    X, W = torch.randn(6, 16, device=device), torch.randn(3, 8, 16, device=device)
    m_sizes = torch.tensor([2, 0, 4], device=device)
    product = _Product()
    exported = torch.export.export(product, (X, W, m_sizes)).module()
    expected = product(X, W, m_sizes)
    torch.testing.assert_close(exported(X, W, m_sizes), expected)
    with torch.autocast(X.device.type, torch.bfloat16):
        torch.testing.assert_close(exported(X, W, m_sizes), expected)
