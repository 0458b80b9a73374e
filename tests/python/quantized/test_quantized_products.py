"""Products and layers with quantised weights: the bits of those with dequantised ones, and the same gradients."""

import moegemm
import pytest
import torch
from conftest import NO_CUDA, make_case
from moegemm.bench.kinds import quantised
from quantized_reference import WORDS, random_weight

N, K = 48, 128
DTYPES = [torch.bfloat16, torch.float16]
SENTENCE = "a quantised weight is frozen"


def weight(word: str, device: str = "cpu", experts: int = 5, n: int = N, k: int = K, seed: int = 0):
    values, scales = random_weight(word, experts, n, k, seed)
    return moegemm.QuantizedWeight(values.to(device), scales.to(device), word)


def routed(device: str, flags: str, dtype: torch.dtype, n: int = N, k: int = K):
    return make_case(device, flags, dtype, n=n, k=k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", ["plain", "permute_x", "permute_y", "permute_y_mul"])
@pytest.mark.parametrize("word", WORDS)
def test_a_product_has_the_bits_of_the_dequantised_one(device, word, flags, dtype):
    case, w = routed(device, flags, dtype), weight(word, device)
    keywords = {"permute_x": case.permute_x, "permute_y": case.permute_y, "fuse_mul_post": case.fuse_mul_post}
    results = []
    for W in (w, w.dequantize(dtype)):
        x = case.X.clone().requires_grad_()
        weights = None if case.topk_weights is None else case.topk_weights.clone().requires_grad_()
        y = moegemm.grouped_gemm(
            x, W, case.m_sizes, case.topk, case.gather_indices, topk_weights=weights, is_first_gemm=not case.permute_y,
            **keywords,
        )  # fmt: skip
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y))
        results.append([y, x.grad] + ([] if weights is None else [weights.grad]))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@NO_CUDA
@pytest.mark.parametrize("k", [768, 1280, 1536, 2304])  # 3, 5, 6 and 9 times what a warp takes at once
@pytest.mark.parametrize("word", ["mxfp4", "int4/32", "int4/64", "int4/128", "nf4/64", "fp8/128x128"])
def test_few_rows_of_wide_weights_have_the_bits_of_the_dequantised_product(word, k):
    experts, n, tokens = 16, 3104, 24  # every warp of the GPU takes several tiles
    w = quantised.random_weight(word, experts, n, k, "cuda")
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    m_sizes, gather = moegemm.route(torch.randint(0, experts, (tokens, 2), device="cuda"), experts)
    y, plain = (
        moegemm.grouped_gemm_forward(x, W, 2, m_sizes, gather, permute_x=True) for W in (w, w.dequantize())
    )  # fmt: skip
    assert torch.equal(y, plain)


@pytest.mark.parametrize("word", WORDS)
def test_the_raw_functions_take_it(device, word):
    case, w = routed(device, "plain", torch.bfloat16), weight(word, device)
    plain = w.dequantize()
    arguments = (case.topk, case.m_sizes)
    y = moegemm.grouped_gemm_forward(case.X, w, *arguments)
    assert torch.equal(y, moegemm.grouped_gemm_forward(case.X, plain, *arguments))
    out = torch.empty_like(y)
    assert moegemm.grouped_gemm_forward(case.X, w, *arguments, out=out) is out
    assert torch.equal(out, y)
    wide = moegemm.grouped_gemm_forward(case.X, w, *arguments, out_dtype=torch.float32)
    assert torch.equal(wide, moegemm.grouped_gemm_forward(case.X, plain, *arguments, out_dtype=torch.float32))
    dx = moegemm.grouped_gemm_dX(y, w, None, case.m_sizes, case.topk)
    assert torch.equal(dx, moegemm.grouped_gemm_dX(y, plain, None, case.m_sizes, case.topk))


def test_a_gradient_of_it_is_refused_when_the_graph_is_built():
    case, w = routed("cpu", "plain", torch.bfloat16), weight("fp8/channel")
    call = (case.X, w, case.m_sizes, case.topk)
    with pytest.raises(TypeError, match=SENTENCE):
        moegemm.grouped_gemm(*call, dW_only=True)
    with pytest.raises(TypeError, match=SENTENCE):
        moegemm.grouped_gemm(*call, accumulate=True)
    with pytest.raises(TypeError, match=SENTENCE):
        moegemm.grouped_gemm(*call, weight_gradients=moegemm.WeightGradients())
    w.scales.requires_grad_()
    with pytest.raises(TypeError, match=SENTENCE):
        moegemm.grouped_gemm(*call)
    with torch.no_grad():
        moegemm.grouped_gemm(*call)


@pytest.mark.parametrize("which", [0, 1])
def test_a_transposed_layout_of_a_layer_is_refused(which):
    weights = [torch.randn(5, 128, 64), torch.randn(5, 64, 64)]
    weights[which] = moegemm.quantize(weights[which], "mxfp4")
    name = ("w_gate_up", "w_down")[which]
    with pytest.raises(
        ValueError, match=rf"transposed is True with {name} in mxfp4; quantised weights are \[E, N, K\]"
    ):
        moegemm.moe_mlp(torch.randn(4, 64), *weights, torch.zeros(4, 1, dtype=torch.int64), None, transposed=True)


def test_dW_takes_no_quantised_operand():
    case, w = routed("cpu", "plain", torch.bfloat16), weight("fp8/channel")
    for operands in ((w, case.X), (case.X, w)):
        with pytest.raises(TypeError, match=SENTENCE):
            moegemm.grouped_gemm_dW(*operands, case.m_sizes, None, 1)


BAD_SCALES = [
    ("mxfp4", 255), ("fp8/128x128", float("inf")), ("fp8/channel", float("nan")), ("fp8/tensor", float("-inf")),
    ("int4/32", float("nan")), ("nf4/64", float("nan")),
]  # fmt: skip


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize(("word", "bad"), BAD_SCALES)
def test_check_finds_scales_that_are_no_numbers(device, monkeypatch, word, bad, by):
    case, w = routed(device, "plain", torch.bfloat16), weight(word, device)
    dy = torch.randn(case.X.size(0), N).to(case.X)
    x, first, second, ids, router = layer_arguments(word, device, torch.bfloat16)
    products = {
        "grouped_gemm": lambda **k: moegemm.grouped_gemm(case.X, w, case.m_sizes, 1, **k),
        "forward": lambda **k: moegemm.grouped_gemm_forward(case.X, w, 1, case.m_sizes, **k),
        "dX": lambda **k: moegemm.grouped_gemm_dX(dy, w, None, case.m_sizes, 1, **k),
    }
    layers = {
        "moe_mlp": lambda: moegemm.moe_mlp(x, first, second, ids, router),
        "experts_mlp": lambda: moegemm.experts_mlp(x, first, second, torch.tensor([T, 0, 0, 0], device=device)),
        "lora_moe_mlp": lambda: moegemm.lora_moe_mlp(x, first, second, ids, router),
    }
    if by == "environment":
        monkeypatch.setenv("MOEGEMM_CHECK", "1")
    asked = {"check": True} if by == "argument" else {}
    for call in products.values():
        call(**asked)
    for call in layers.values():
        call()
    for damaged in (w, second):
        damaged.scales.data[2].view(-1)[-1:] = bad
    place = [2, *(size - 1 for size in w.scales.shape[1:])]
    message = rf"scales\{str(place)[:-1]}\] of W, of expert 2, is {bad}\b.*; scales of {word} must be finite"
    for call in products.values():
        with pytest.raises(ValueError, match=message):
            call(**asked)
    for call in layers.values():
        if by == "environment":
            with pytest.raises(ValueError, match="of w_down, of expert 2, is"):
                call()
        else:
            call()


def test_a_transposed_layout_is_refused():
    x, first, _, ids, weights = layer_arguments("mxfp4", "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match=r"quantised weights are \[E, N, K\] only"):
        moegemm.moe_mlp(x, first, first, ids, weights, activation="silu", transposed=True)


E, H, INNER, T, TOPK = 4, 128, 64, 21, 2


def layer_arguments(word: str, device: str, dtype: torch.dtype):
    inner = 128 if word == "int4/128" else INNER
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(T, H, generator=generator).to(device, dtype)
    router, ids = torch.randn(T, E, generator=generator).softmax(-1).topk(TOPK)
    first, second = weight(word, device, E, 2 * inner, H, 1), weight(word, device, E, H, inner, 2)
    return x, first, second, ids.to(device), router.to(device)


def biases(first, second, dtype):
    return {
        "gate_up_bias": torch.randn(E, first.size(1)).to(first.device, dtype),
        "down_bias": torch.randn(E, second.size(1)).to(first.device, dtype),
    }


def outputs(run, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output and every gradient of `run`, which gets leaves of its own."""
    own = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in leaves.items()}
    out = run(own)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out))
    return {"out": out.detach(), **{name: t.grad for name, t in own.items()}}


def assert_equal(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.smoke
@pytest.mark.parametrize("word", WORDS)
def test_the_layer_has_the_bits_of_the_dequantised_one(device, word):
    x, first, second, ids, router = layer_arguments(word, device, torch.bfloat16)
    leaves = {"x": x, "router": router, **biases(first, second, torch.bfloat16)}

    def run(weights):
        def layer(t):
            keywords = {"gate_up_bias": t["gate_up_bias"], "down_bias": t["down_bias"], "layout": "interleaved"}
            return moegemm.moe_mlp(t["x"], *weights, ids, t["router"], "clamped_swiglu", **keywords)

        return outputs(layer, leaves)

    plain = (first.dequantize(), second.dequantize())
    assert_equal(run((first, second)), run(plain))
    assert_equal(run((first, plain[1])), run(plain))  # one quantised, one not
    with torch.no_grad():
        quantised, expected = (moegemm.moe_mlp(x, *weights, ids, router) for weights in ((first, second), plain))
    assert torch.equal(quantised, expected)


def test_gate_and_up_may_be_two(device):
    x, _, second, ids, router = layer_arguments("mxfp4", device, torch.bfloat16)
    gate, up = weight("mxfp4", device, E, INNER, H, 6), weight("int4/32", device, E, INNER, H, 7)
    got, expected = (
        outputs(lambda t, w=w: moegemm.moe_mlp(t["x"], w[:2], w[2], ids, t["router"]), {"x": x, "router": router})
        for w in ((gate, up, second), (gate.dequantize(), up.dequantize(), second.dequantize()))
    )
    assert_equal(got, expected)


@pytest.mark.parametrize("word", WORDS)
def test_rows_in_expert_order_take_it(device, word):
    _, first, second, _, _ = layer_arguments(word, device, torch.bfloat16)
    rows, sizes = torch.randn(12, H).to(device, torch.bfloat16), torch.tensor([5, 0, 4, 2], device=device)
    leaves = {"rows": rows, "row_weights": torch.rand(12, device=device), **biases(first, second, torch.bfloat16)}
    got, expected = (
        outputs(
            lambda t, w=w: moegemm.experts_mlp(
                t["rows"], *w, sizes, row_weights=t["row_weights"], gate_up_bias=t["gate_up_bias"],
                down_bias=t["down_bias"],
            ),
            leaves,
        )
        for w in ((first, second), (first.dequantize(), second.dequantize()))
    )  # fmt: skip
    assert_equal(got, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("word", WORDS)
def test_adapters_stand_beside_it(device, word, dropout):
    x, first, second, ids, router = layer_arguments(word, device, torch.bfloat16)
    shapes = {"A1": (E, 8, H), "B1": (E, first.size(1), 8), "A2": (E, 8, second.size(2)), "B2": (E, H, 8)}
    factors = {name: torch.randn(shape).to(device) * 0.1 for name, shape in shapes.items()}
    leaves = {"x": x, "router": router, **factors, **biases(first, second, torch.bfloat16)}

    def run(weights):
        def layer(t):
            torch.manual_seed(1)
            adapters = (moegemm.LowRank(t[f"A{i}"], t[f"B{i}"], 0.5, dropout) for i in (1, 2))
            keywords = {"gate_up_bias": t["gate_up_bias"], "down_bias": t["down_bias"]}
            return moegemm.lora_moe_mlp(t["x"], *weights, ids, t["router"], *adapters, **keywords)

        return outputs(layer, leaves)

    assert_equal(run((first, second)), run((first.dequantize(), second.dequantize())))


def test_the_backward_keeps_packed_bytes_only():
    x, first, second, ids, router = layer_arguments("mxfp4", "cpu", torch.bfloat16)
    kept = []

    def keep(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moegemm.moe_mlp(x.requires_grad_(), first, second, ids, router)
    packed = {(tuple(t.shape), t.dtype) for w in (first, second) for t in (w.values, w.scales)}
    assert packed <= set(kept)
    weights = {(tuple(w.shape), torch.bfloat16) for w in (first, second)}
    assert not weights & set(kept)


def test_weights_of_autocast_stay_packed(device):
    x, first, second, ids, router = layer_arguments("mxfp4", device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        got = moegemm.moe_mlp(x, first, second, ids, router)
        rows = moegemm.grouped_gemm(x, first, torch.tensor([T, 0, 0, 0], device=device), 1)
    assert torch.equal(got, moegemm.moe_mlp(x.bfloat16(), first, second, ids, router))
    assert rows.dtype == torch.bfloat16


@pytest.mark.parametrize("device_of_x", ["meta"])
def test_a_layer_without_memory_has_a_shape(device_of_x):
    x, first, second, ids, router = layer_arguments("mxfp4", "cpu", torch.bfloat16)
    out = moegemm.moe_mlp(
        x.to("meta").requires_grad_(), first.to("meta"), second.to("meta"), ids.to("meta"), router.to("meta")
    )
    out.sum().backward()
    assert tuple(out.shape) == (T, H)


def test_fake_tensors_run_the_layer():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(T, H, dtype=torch.bfloat16, requires_grad=True)
        first = moegemm.QuantizedWeight.from_mxfp4(
            torch.empty(E, 2 * INNER, H // 2, dtype=torch.uint8), torch.empty(E, 2 * INNER, H // 32, dtype=torch.uint8)
        )
        second = moegemm.QuantizedWeight.from_mxfp4(
            torch.empty(E, H, INNER // 2, dtype=torch.uint8), torch.empty(E, H, INNER // 32, dtype=torch.uint8)
        )
        ids, router = torch.empty(T, TOPK, dtype=torch.int64), torch.empty(T, TOPK)
        out = moegemm.moe_mlp(x, first, second, ids, router)
        out.sum().backward()
        assert tuple(out.shape) == (T, H)
        assert tuple(first.dequantize().shape) == tuple(first.shape)


@pytest.mark.smoke
@pytest.mark.parametrize("word", ["mxfp4", "fp8/128x128", "int4/32", "nf4/64"])
def test_compiled_code_has_the_same_bits(device, word):
    x, first, second, ids, router = layer_arguments(word, device, torch.bfloat16)

    def step(x, first, second, ids, router):
        return moegemm.moe_mlp(x, first, second, ids, router).float().square().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaf, weights = x.clone().requires_grad_(), router.clone().requires_grad_()
        loss = function(leaf, first, second, ids, weights)
        loss.backward()
        results.append((loss.detach(), leaf.grad, weights.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_compiled_module_and_product_take_it(device):
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight("mxfp4", device)
            self.adapter = moegemm.LoraAdapter(E, H, 2 * INNER, 8, device=device)
            self.first, self.second = layer_arguments("mxfp4", device, torch.bfloat16)[1:3]

        def forward(self, x, m_sizes, tokens, ids, router):
            out = moegemm.lora_moe_mlp(tokens, self.first, self.second, ids, router, self.adapter)
            return moegemm.grouped_gemm(x, self.w, m_sizes, 1).float().sum() + out.float().sum()

    module = Experts()
    x, m_sizes = torch.randn(9, K).to(device, torch.bfloat16), torch.tensor([4, 0, 3, 2, 0], device=device)
    tokens, _, _, ids, router = layer_arguments("mxfp4", device, torch.bfloat16)
    leaf = x.clone().requires_grad_()
    expected = module(leaf, m_sizes, tokens, ids, router)
    expected.backward()
    again = x.clone().requires_grad_()
    got = torch.compile(module, fullgraph=True)(again, m_sizes, tokens, ids, router)
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)  # torch may sum in another order
    assert torch.equal(again.grad, leaf.grad)


@NO_CUDA
def test_weights_that_a_pass_decodes_take_bounded_memory_and_keep_their_bits():
    """fp32 activations, which no GPU kernel decodes for: 2.1 GB of decoded weights in cuts of at most 1 GiB."""
    experts, n, k, tokens = 64, 2880, 2880, 96
    w = quantised.random_weight("mxfp4", experts, n, k, "cuda")
    x, dy = (torch.randn(tokens * 2, columns, device="cuda") for columns in (k, n))
    m_sizes, gather = moegemm.route(torch.randint(experts, (tokens, 2), device="cuda"), experts)
    calls = {
        "forward": lambda w: moegemm.grouped_gemm_forward(x, w, 1, m_sizes, gather, permute_y=True),
        "dX": lambda w: moegemm.grouped_gemm_dX(dy, w, gather, m_sizes, 1, permute_x=True),
    }
    for name, call in calls.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        got = call(w)
        assert torch.cuda.max_memory_allocated() - before < 1.1 * 2**30, name
        assert torch.equal(got, call(w.dequantize(torch.float32))), name


@NO_CUDA
def test_a_cuda_graph_replays_the_layer():
    x, first, second, ids, router = layer_arguments("mxfp4", "cuda", torch.bfloat16)
    with torch.no_grad():
        moegemm.moe_mlp(x, first, second, ids, router)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = moegemm.moe_mlp(x, first, second, ids, router)
        x.copy_(torch.randn_like(x))
        ids.copy_(ids.flip(0))
        graph.replay()
        assert torch.equal(out, moegemm.moe_mlp(x, first, second, ids, router))


def test_flops_are_those_of_the_weights_that_it_stands_for():
    from torch.utils.flop_counter import FlopCounterMode

    case = routed("cpu", "plain", torch.bfloat16)
    for word in ("mxfp4", "fp8/channel", "int4/32", "nf4/64"):
        with FlopCounterMode(display=False) as counter:
            moegemm.grouped_gemm(case.X, weight(word), case.m_sizes, 1)
        assert counter.get_total_flops() == 2 * case.X.size(0) * N * K


def test_forward_mode_is_refused():
    case, w = routed("cpu", "plain", torch.bfloat16), weight("mxfp4")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(case.X, torch.ones_like(case.X))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            moegemm.grouped_gemm(dual, w, case.m_sizes, 1)


def test_its_kernels_are_measured():
    case = routed("cpu", "plain", torch.bfloat16)
    w = weight("mxfp4")
    reports = moegemm.tune(case.X, w, case.m_sizes, 1, budget=0.05)
    assert [report["problem"].split()[0] for report in reports] == ["forward", "dX"]
    tuned = moegemm.grouped_gemm(case.X, w, case.m_sizes, 1, autotune=True)
    torch.testing.assert_close(tuned, moegemm.grouped_gemm(case.X, w.dequantize(), case.m_sizes, 1))
