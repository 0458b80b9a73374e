"""experts_mlp under checkpointing, autocast, torch.compile, CUDA graphs and without memory."""

import moegemm
import pytest
import torch
from conftest import NO_CUDA
from expert_rows import as_pairs, check_replays, leaves_of, make_rows, results
from layer_reference import relative_error
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_autocast_leaves_what_torch_mm_would_leave(device, dtype):
    tensors, options = make_rows(device)
    tensors["w_gate_up"] = tensors["w_gate_up"].to(dtype)
    with torch.autocast(device, torch.bfloat16), pytest.raises(TypeError, match="w_gate_up has dtype"):
        moegemm.experts_mlp(**tensors, **options)
