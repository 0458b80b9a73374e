"""experts_mlp: rows in expert order, with weights of rows, pairs of gate and up, and the caller's memory."""

import moegemm
import pytest
import torch
from conftest import NO_CUDA
from expert_rows import SIZES, as_pairs, check_replays, leaves_of, make_rows, results
from layer_reference import GATED, UNGATED, Layer, reference_gradients, relative_error
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint


def expected_results(tensors: dict, options: dict, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain layer of as many tokens, each with one slot."""
    sizes = options["sizes"]
    count = tensors["rows"].size(0)
    owners = torch.full((count, 1), -1, device=sizes.device)
    owners[: int(sizes.sum()), 0] = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes.long())
    weights = tensors["row_weights"]
    named = {
        "x": tensors["rows"].nan_to_num(),
        "w_gate_up": tensors["w_gate_up"],
        "w_down": tensors["w_down"],
        "router_weights": None if weights is None else weights.nan_to_num().unsqueeze(1),
        "gate_up_bias": tensors["gate_up_bias"],
        "down_bias": tensors["down_bias"],
    }
    plain = {name: value for name, value in options.items() if name != "sizes"}
    found = reference_gradients(Layer(named, owners, plain), d_out)
    found["rows"] = found.pop("x")
    if weights is not None:
        found["row_weights"] = found.pop("router_weights").squeeze(1)
    return found


def check(tensors: dict, options: dict, **more) -> None:
    d_out = torch.randn_like(tensors["rows"])
    got, expected = results(tensors, options, d_out, **more), expected_results(tensors, options, d_out)
    dtype = tensors["rows"].dtype
    limit = 2e-6 if dtype == torch.float32 else 6**0.5 * torch.finfo(dtype).eps / 2
    for name, value in expected.items():
        assert relative_error(got[name], value) <= limit, name
    tail = tensors["rows"].isnan().any(1)
    assert not got["out"][tail].any()
    assert not got["rows"][tail].any()
    with torch.no_grad():
        out = moegemm.experts_mlp(**tensors, **options, **more)
    assert torch.equal(out, got["out"])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("activation", [*GATED, *UNGATED])
def test_every_activation(device, activation, transposed, bias, weighted):
    # A gate that a rounding moves across zero has another slope there: in fp32 none of these is so near.
    dtype = torch.float32 if device == "cpu" or "relu" in activation or activation == "reglu" else torch.bfloat16
    check(*make_rows(device, dtype, activation=activation, transposed=transposed, bias=bias, weighted=weighted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_every_dtype_and_layout(device, dtype, layout, index_dtype):
    weights_dtype = torch.float32 if index_dtype == torch.int32 else dtype
    check(*make_rows(device, dtype, layout=layout, bias=True, index_dtype=index_dtype, weights_dtype=weights_dtype))


@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (7, 13), (64, 256), (136, 520)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes(device, hidden, inner, dtype):
    check(*make_rows(device, dtype, hidden=hidden, inner=inner, bias=True))


@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 7, 0), (1,)])
@pytest.mark.parametrize("tail", [0, 5])
def test_few_rows(device, sizes, tail):
    tensors, options = make_rows(device, sizes=sizes, tail=tail, bias=True)
    if sum(sizes):
        return check(tensors, options)
    d_out = torch.randn_like(tensors["rows"])
    assert not any(value.any() for value in results(tensors, options, d_out).values())
    return None


def test_weights_of_one_change_nothing(device):
    tensors, options = make_rows(device, torch.bfloat16, weighted=False)
    d_out = torch.randn_like(tensors["rows"])
    expected = results(tensors, options, d_out)
    ones = {**tensors, "row_weights": torch.ones(len(d_out), device=device)}
    got = results(ones, options, d_out)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_the_bits_of_the_layer_of_tokens(device):
    """Without weights both are the same products."""
    tensors, options = make_rows(device, torch.bfloat16, weighted=False, bias=True, tail=0)
    d_out = torch.randn_like(tensors["rows"])
    got = results(tensors, options, d_out)
    owners = torch.repeat_interleave(torch.arange(len(SIZES), device=device), options.pop("sizes")).unsqueeze(1)
    mine = leaves_of(tensors)
    rows, _ = mine.pop("rows"), mine.pop("row_weights")
    out = moegemm.moe_mlp(rows, expert_ids=owners, router_weights=None, **mine, **options)
    given = {"rows": rows, **mine}
    gradients = dict(zip(given, torch.autograd.grad(out, list(given.values()), d_out), strict=True))
    assert torch.equal(got["out"], out)
    assert all(torch.equal(got[name], value) for name, value in gradients.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("which", ["experts_mlp", "moe_mlp", "moe_mlp with a capacity"])
def test_gate_and_up_as_two_tensors(device, which, activation, transposed, dtype):
    """The same bits but in dX, whose two parts are added before it is rounded."""
    tensors, options = make_rows(device, dtype, activation=activation, transposed=transposed, bias=True, tail=0)
    if which != "experts_mlp":
        sizes = options.pop("sizes")
        count = len(tensors["rows"])
        ids = torch.randint(-1, len(sizes), (count, 2), device=device)
        tensors["x"], tensors["router_weights"] = tensors.pop("rows"), torch.rand(count, 2, device=device)
        del tensors["row_weights"]
        options["expert_ids"] = ids
        if "capacity" in which:
            options["max_rows"] = 2 * count
    call = moegemm.experts_mlp if which == "experts_mlp" else moegemm.moe_mlp
    mine, apart = leaves_of(tensors), as_pairs(leaves_of(tensors), options)
    apart = {
        name: tuple(t.detach().requires_grad_() for t in value) if isinstance(value, tuple) else value
        for name, value in apart.items()
    }
    out, other = call(**mine, **options), call(**apart, **options)
    assert torch.equal(out, other)
    d_out = torch.randn_like(out)
    out.backward(d_out)
    other.backward(d_out)
    dim = 2 if transposed else 1
    for name, value in mine.items():
        parts = apart[name]
        got = torch.cat([t.grad for t in parts], dim if "w_" in name else 1) if isinstance(parts, tuple) else parts.grad
        if name in ("rows", "x"):
            assert relative_error(got, value.grad.double()) <= 2 * torch.finfo(dtype).eps
        else:
            assert torch.equal(got, value.grad), name
    with torch.no_grad():
        assert torch.equal(call(**apart, **options), out)


def test_sizes_and_starts_may_be_one_tensor(device):
    sizes, starts = (torch.tensor(t, device=device) for t in ([5, 0, 3], [9, 2, 1]))
    rows, gate_up, down = (torch.randn(*shape, device=device) for shape in ((14, 16), (3, 24, 16), (3, 16, 12)))
    expected = moegemm.experts_mlp(rows, gate_up, down, sizes, starts=starts)
    assert torch.equal(moegemm.experts_mlp(rows, gate_up, down, torch.stack((sizes, starts))), expected)
    with pytest.raises(ValueError, match=r"sizes is \[3, 3\]; its shape must be \[E\]"):
        moegemm.experts_mlp(rows, gate_up, down, torch.stack((sizes, starts, starts)))


def test_a_frozen_half_of_a_pair_costs_no_gradient(device):
    tensors, options = make_rows(device)
    pairs = as_pairs(tensors, options)
    gate, up = (t.requires_grad_(trained) for t, trained in zip(pairs["w_gate_up"], (False, True), strict=True))
    moegemm.experts_mlp(**{**pairs, "w_gate_up": (gate, up)}, **options).sum().backward()
    assert gate.grad is None
    assert up.grad.shape == up.shape


def test_pairs_are_read_where_they_are(device, monkeypatch):
    tensors, options = make_rows(device, bias=False)
    pairs = as_pairs(tensors, options) | leaves_of({"rows": tensors["rows"]})
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: pytest.fail("the weights were put together"))
    moegemm.experts_mlp(**pairs, **options).sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("weighted_bias", [False, True])
@pytest.mark.parametrize("pitch", [0, 8])
def test_out_is_written_and_returned(device, pitch, weighted_bias, grad):
    tensors, options = make_rows(device, torch.bfloat16, bias=weighted_bias, weighted=weighted_bias)
    expected = moegemm.experts_mlp(**tensors, **options)
    wide = torch.full((len(expected), 24 + pitch), 7.0, device=device, dtype=torch.bfloat16)
    out = wide[:, :24]
    before = out._version
    mine = leaves_of(tensors) if grad else tensors
    got = moegemm.experts_mlp(**mine, **options, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert got is not out
    assert out._version == before + 1
    assert torch.equal(out, expected)
    assert (wide[:, 24:] == 7).all()
    if grad:
        assert got.requires_grad
        assert not out.requires_grad
        got.sum().backward()
        plain = leaves_of(tensors)
        moegemm.experts_mlp(**plain, **options).sum().backward()
        for name, leaf in mine.items():
            assert leaf is None or torch.equal(leaf.grad, plain[name].grad), name


@pytest.mark.parametrize("pair", [False, True])
def test_the_gradient_of_rows_is_written_where_the_caller_says(device, pair):
    tensors, options = make_rows(device, torch.bfloat16)
    if pair:
        tensors = as_pairs(tensors, options)
    rows = tensors.pop("rows")
    plain, mine = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    d_out = torch.randn_like(rows)
    (expected,) = torch.autograd.grad(moegemm.experts_mlp(plain, **tensors, **options), plain, d_out)
    buffer = torch.full_like(rows, float("nan"))
    before = buffer._version
    out = moegemm.experts_mlp(mine, **tensors, **options, grad_rows_out=buffer)
    assert buffer.isnan().all()
    (got,) = torch.autograd.grad(out, mine, d_out)
    assert got.data_ptr() == buffer.data_ptr()
    assert buffer._version > before
    assert torch.equal(buffer, expected)


@pytest.mark.parametrize("options", [{}, {"max_rows": 40}, {"topk": 1}])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_the_layer_of_tokens_writes_to_the_callers_memory(device, options, leading):
    topk = options.pop("topk", 2) if "topk" in options else 2
    x = torch.randn(*leading, 10, 8, device=device)
    weights = torch.randn(3, 12, 8, device=device), torch.randn(3, 8, 6, device=device)
    ids = torch.randint(3, (*leading, 10, topk), device=device)
    plain = x.clone().requires_grad_()
    expected = moegemm.moe_mlp(plain, *weights, ids, None, **options)
    expected.sum().backward()
    out, grad_x = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    mine = x.clone().requires_grad_()
    got = moegemm.moe_mlp(mine, *weights, ids, None, **options, out=out, grad_x_out=grad_x)
    assert got.data_ptr() == out.data_ptr()
    got.sum().backward()
    assert torch.equal(out, expected)
    assert torch.equal(grad_x, plain.grad)
    assert torch.equal(mine.grad, plain.grad)
    with torch.no_grad():
        got = moegemm.moe_mlp(x, *weights, ids, None, **options, out=out.zero_())
    assert got is not out
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


def test_a_buffer_serves_one_step_after_another(device):
    """It takes part in no graph, so that nothing of an earlier step lives on in it."""
    tensors, options = make_rows(device)
    out = torch.empty_like(tensors["rows"])
    for _ in range(3):
        mine = leaves_of(tensors)
        moegemm.experts_mlp(**mine, **options, out=out).sum().backward()
        assert out.grad_fn is None


def test_overwriting_a_result_that_is_still_needed_is_noticed(device):
    tensors, options = make_rows(device)
    out = torch.empty_like(tensors["rows"])
    loss = moegemm.experts_mlp(**leaves_of(tensors), **options, out=out).square().sum()
    moegemm.experts_mlp(**tensors, **options, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: {"out": t["rows"]}, ValueError, "out shares memory with rows; it must have its own"),
        (lambda t: {"out": t["rows"][:3]}, ValueError, r"out is \[3, 24\]; its shape must be \[22, 24\]"),
        (lambda t: {"out": torch.empty(24, 22).T}, ValueError, r"out has strides \[1, 22\]; its last dimension must"),
        (lambda t: {"out": torch.empty(22, 24).double()}, TypeError, "out has dtype torch.float64; it must have"),
        (lambda t: {"out": torch.empty(22, 24, device="meta")}, TypeError, "out is on meta; it must be on cpu"),
        (lambda t: {"out": torch.empty(22, 24).requires_grad_()}, RuntimeError, "out requires grad; a tensor that"),
        (lambda t: {"out": 3}, TypeError, "out is 3 of type int; a torch.Tensor is accepted"),
        (lambda t: {"grad_rows_out": t["rows"]}, ValueError, "grad_rows_out shares memory with rows"),
        (
            lambda t: {"out": (b := torch.empty(23, 24))[:22], "grad_rows_out": b[1:]},
            ValueError,
            "grad_rows_out shares memory with out",
        ),
        (lambda t: {"sizes": torch.ones(4, dtype=torch.int32)}, ValueError, r"sizes is .*\[4\].*\[E\] = \[5\]"),
        (lambda t: {"sizes": torch.ones(5)}, TypeError, "sizes has dtype"),
        (lambda t: {"sizes": torch.ones(5, 1, dtype=torch.int32)}, ValueError, "sizes"),
        (lambda t: {"sizes": [1, 2]}, TypeError, r"sizes is \[1, 2\] of type list; a torch.Tensor is accepted"),
        (lambda t: {"rows": t["rows"][:, :7]}, ValueError, r"w_down is .*\[5, 24, 40\].*\[E, H, I\]"),
        (lambda t: {"row_weights": torch.ones(21)}, ValueError, r"row_weights is .*\[21\].*\[R\] = \[22\]"),
        (lambda t: {"row_weights": torch.ones(22, 1)}, ValueError, "row_weights"),
        *(
            (lambda t, d=d: {"row_weights": torch.ones(22).to(d)}, TypeError, f"row_weights has dtype {d}; a floating")
            for d in (torch.int32, torch.complex64, torch.bool)
        ),
        (lambda t: {"row_weights": 1.0}, TypeError, "row_weights is 1.0 of type float; a torch.Tensor is accepted"),
        (lambda t: {"w_gate_up": (t["w_gate_up"],)}, ValueError, r"w_gate_up has 1 tensors; one tensor or a pair"),
        (
            lambda t: {"w_gate_up": (t["w_gate_up"], t["w_gate_up"])},
            ValueError,
            r"w_gate_up\[0\] is .*\[5, 80, 24\].*\[E, I, H\] = \[5, 40, 24\]",
        ),
        (
            lambda t: {"w_gate_up": tuple(t["w_gate_up"].chunk(2, 1)), "layout": "interleaved"},
            ValueError,
            r"w_gate_up\[1\] is given with activation silu/interleaved; .*concatenated",
        ),
        (
            lambda t: {"w_gate_up": tuple(t["w_gate_up"].chunk(2, 1)), "activation": "relu"},
            ValueError,
            r"w_gate_up\[1\] is given with activation relu/none; .*of a gated activation",
        ),
        (
            lambda t: {"gate_up_bias": (torch.ones(5, 40), torch.ones(5, 41))},
            ValueError,
            r"gate_up_bias is a pair of \[5, 40\] .* and \[5, 41\]",
        ),
        *(
            (
                lambda t, o=o: {"gate_up_bias": (torch.ones(5, 40),) * 2, **o},
                ValueError,
                r"gate_up_bias\[1\] is given with activation .*; .*of a gated activation, concatenated",
            )
            for o in ({"layout": "interleaved"}, {"activation": "relu"})
        ),
        (lambda t: {"w_down": t["w_down"].half()}, TypeError, "w_down has dtype"),
        (
            lambda t: {"w_gate_up": ((w := t["w_gate_up"].chunk(2, 1))[0], w[1].to("meta"))},
            TypeError,
            r"w_gate_up\[1\] is on meta; it must be on cpu, where rows is",
        ),
        (
            lambda t: {
                "w_gate_up": (w := [p.clone() for p in t["w_gate_up"].chunk(2, 1)]),
                "out": w[1].view(-1, 24)[:22],
            },
            ValueError,
            r"out shares memory with w_gate_up\[1\]; it must have its own",
        ),
        (lambda t: {"transposed": "yes"}, TypeError, "transposed is 'yes' of type str; True and False are accepted"),
        (lambda t: {"alpha": "a"}, TypeError, "alpha is 'a' of type str; a number or None is accepted"),
        (lambda t: {"limit": True}, TypeError, "limit is True of type bool; a number or None is accepted"),
        (lambda t: {"activation": "swish"}, ValueError, "activation is 'swish'; accepted are"),
    ],
)
def test_refusals_name_the_argument_its_value_and_the_rule(change, error, message):
    tensors, options = make_rows()
    with pytest.raises(error, match=message):
        moegemm.experts_mlp(**{**tensors, **options, **change(tensors)})


def test_columns_of_one_matrix_do_not_overlap(device):
    both = torch.randn(22, 48, device=device)
    tensors, options = make_rows(device)
    tensors["rows"] = both[:, :24]
    moegemm.experts_mlp(**tensors, **options, out=both[:, 24:])


def test_checkpointing_gives_the_same_gradients(device):
    tensors, options = make_rows(device, bias=True)
    d_out = torch.randn_like(tensors["rows"])
    expected = results(tensors, options, d_out)
    mine = leaves_of(tensors)
    out = checkpoint(lambda: moegemm.experts_mlp(**mine, **options), use_reentrant=False)
    out.backward(d_out)
    assert all(torch.equal(t.grad, expected[name]) for name, t in mine.items())


def test_autocast(device):
    tensors, options = make_rows(device, bias=True)
    with torch.autocast(device, torch.bfloat16):
        out = moegemm.experts_mlp(**leaves_of(tensors), **options)
    assert out.dtype == torch.bfloat16
    low = {name: t if name == "row_weights" else t.bfloat16() for name, t in tensors.items()}
    assert torch.equal(out, moegemm.experts_mlp(**low, **options))
    out.sum().backward()


def test_frozen_experts_get_no_gradient(device):
    tensors, options = make_rows(device, bias=True)
    rows = tensors.pop("rows").requires_grad_()
    moegemm.experts_mlp(rows, **tensors, **options).sum().backward()
    assert rows.grad is not None
    assert all(t.grad is None for t in tensors.values())


def test_fake_and_meta_tensors_have_the_results_shape():
    tensors, options = make_rows(dtype=torch.bfloat16, bias=True)
    meta = {name: t.to("meta").requires_grad_() for name, t in tensors.items()}
    out = moegemm.experts_mlp(**meta, **{**options, "sizes": options["sizes"].to("meta")})
    assert (out.shape, out.dtype, out.device.type) == (tensors["rows"].shape, torch.bfloat16, "meta")
    out.sum().backward()
    assert all(t.grad.shape == t.shape for t in meta.values())


@pytest.mark.parametrize("case", ["plain", "pair", "out"])
def test_compiles_as_one_graph(device, case):
    tensors, options = make_rows(device, bias=True)
    d_out = torch.randn_like(tensors["rows"])
    expected = results(tensors, options, d_out)
    mine = leaves_of(tensors)
    buffers = {}
    given = mine
    if case == "pair":
        given = as_pairs(mine, options)
    if case == "out":
        buffers = {"out": torch.empty_like(d_out), "grad_rows_out": torch.empty_like(d_out)}
    torch._dynamo.reset()
    out = torch.compile(moegemm.experts_mlp, backend="aot_eager", fullgraph=True)(**given, **options, **buffers)
    out.backward(d_out)
    assert torch.equal(out, expected["out"])
    for name, t in mine.items():
        assert relative_error(t.grad, expected[name].double()) <= 1e-6, name
    if case == "out":
        assert torch.equal(buffers["out"], expected["out"])
        assert torch.equal(buffers["grad_rows_out"], expected["rows"])


def test_compiles_with_a_number_of_rows_that_only_the_device_knows(device):
    tensors, options = make_rows(device, bias=True)
    all_rows, all_weights = tensors.pop("rows").nan_to_num(), tensors.pop("row_weights").nan_to_num()

    def step(rows, weights, count):
        received = count.item()
        torch._check(received >= 0)
        torch._check(received <= rows.size(0))
        return moegemm.experts_mlp(rows[:received], **tensors, **options, row_weights=weights[:received])

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for count in (22, 18, 19):
            rows, weights = all_rows.clone().requires_grad_(), all_weights.clone().requires_grad_()
            out = compiled(rows, weights, torch.tensor(count, device=device))
            out.sum().backward()
            expected = moegemm.experts_mlp(all_rows[:count], **tensors, **options, row_weights=all_weights[:count])
            assert torch.equal(out, expected)
            assert not rows.grad[count:].any()


@NO_CUDA
def test_a_cuda_graph_replays_with_other_sizes():
    tensors, options = make_rows("cuda", torch.bfloat16, bias=True, tail=8)
    check_replays(tensors, options, [{"sizes": s} for s in ((5, 0, 3, 9, 1), (0, 26, 0, 0, 0), (1, 2, 3, 4, 5))])


@NO_CUDA
def test_nothing_synchronises():
    tensors, options = make_rows("cuda", torch.bfloat16, bias=True)
    d_out = torch.randn_like(tensors["rows"])
    results(tensors, options, d_out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(tensors, options, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows_of_a_count(rows, row_weights, sizes):
    count = sizes.sum().item()
    torch._check(count >= 0)
    torch._check(count <= rows.size(0))
    return rows[:count], row_weights[:count]


def rows_of_a_mask(rows, row_weights, sizes):
    kept = ~rows.isnan().any(1)
    return rows[kept], row_weights[kept]


@pytest.mark.parametrize("choose", [rows_of_a_count, rows_of_a_mask])
def test_one_graph_serves_row_counts_that_only_the_data_says(choose):
    tensors, options = make_rows()
    sizes = options.pop("sizes")

    def layer(rows, w_gate_up, w_down, row_weights, sizes):
        rows, row_weights = choose(rows, row_weights, sizes)
        return moegemm.experts_mlp(rows, w_gate_up, w_down, sizes, row_weights=row_weights, **options)

    def found(call, sizes):
        leaves = [tensors[name].clone().requires_grad_() for name in ("rows", "w_gate_up", "w_down", "row_weights")]
        out = call(*leaves, sizes)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for these in (sizes, sizes.roll(1)):
            for got, expected in zip(found(compiled, these), found(layer, these), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert counter.frame_count == 1
