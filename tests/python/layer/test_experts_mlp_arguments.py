"""experts_mlp: results and gradients in the caller's memory, and what it refuses."""

import moegemm
import pytest
import torch
from expert_rows import as_pairs, leaves_of, make_rows


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
