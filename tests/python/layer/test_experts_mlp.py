"""experts_mlp: rows in expert order, with weights of rows, and pairs of gate and up."""

import moegemm
import pytest
import torch
from expert_rows import SIZES, as_pairs, leaves_of, make_rows, results
from layer_reference import GATED, UNGATED, Layer, reference_gradients, relative_error


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
