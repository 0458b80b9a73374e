"""moe_mlp with a capacity: the plain layer's results, from rows that this rank has and no others."""

import moegemm
import pytest
import torch
from layer_reference import Layer, make_layer, reference_gradients, relative_error

EXACT = ("out", "x", "router_weights", "gate_up_bias", "down_bias")  # dW adds up rows in an order of its plan's choice


def foreign(layer: Layer, share: float = 0.85) -> Layer:
    """The same layer on a rank that has few of the experts: other ids are larger or negative."""
    ids = layer.expert_ids.clone()
    away = torch.rand(ids.shape, device=ids.device) < share
    ids[away] = torch.tensor([-1, 6, 7, 1000], device=ids.device)[
        torch.randint(4, (int(away.sum()),), device=ids.device)
    ]
    return Layer(layer.tensors, ids, layer.options)


def local_rows(layer: Layer) -> int:
    experts = layer.tensors["w_down"].size(0)
    return int(((layer.expert_ids >= 0) & (layer.expert_ids < experts)).sum())


def results(layer: Layer, d_out: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    mine = layer.leaves()
    out = moegemm.moe_mlp(**mine.tensors, expert_ids=mine.expert_ids, **mine.options, **options)
    given = mine.given()
    gradients = torch.autograd.grad(out, list(given.values()), d_out)
    return {"out": out.detach(), **dict(zip(given, gradients, strict=True))}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        if name in EXACT:
            assert torch.equal(got[name], value), name
        else:
            assert relative_error(got[name], value.double()) <= torch.finfo(value.dtype).eps, name


def one(device: str, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(value, device=device, dtype=dtype)


@pytest.mark.parametrize("spare", [0, 3, 500], ids=["exact", "a little more", "much more"])
@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_layers_bits(device, dtype, ids_dtype, topk, spare):
    layer = foreign(make_layer(device, dtype, tokens=61, hidden=64, inner=48, topk=topk, bias=True))
    layer.expert_ids = layer.expert_ids.to(ids_dtype)
    d_out = torch.randn_like(layer.tensors["x"])
    assert_same(results(layer, d_out, max_rows=local_rows(layer) + spare), results(layer, d_out))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "relu2"])
def test_layouts_and_activations(device, activation, transposed, bias):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = foreign(make_layer(device, dtype, activation=activation, transposed=transposed, bias=bias))
    d_out = torch.randn_like(layer.tensors["x"])
    got = results(layer, d_out, max_rows=local_rows(layer) + 7)
    assert_same(got, results(layer, d_out))
    expected = reference_gradients(layer, d_out)
    limit = 2e-6 if dtype == torch.float32 else 5**0.5 * torch.finfo(dtype).eps / 2
    assert all(relative_error(value, expected[name]) <= limit for name, value in got.items())
    with torch.no_grad():
        out = moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, **layer.options, max_rows=40)
    assert torch.equal(out, got["out"])


def test_without_router_weights_slots_are_summed(device):
    layer = foreign(make_layer(device, bias=True))
    layer.tensors["router_weights"] = None
    d_out = torch.randn_like(layer.tensors["x"])
    assert_same(results(layer, d_out, max_rows=local_rows(layer) + 2), results(layer, d_out))


@pytest.mark.parametrize("count", [0, 5, 13, 99, -4])
def test_tokens_from_num_tokens_on_are_absent(device, count):
    """Their ids and rows are whatever was in memory; NaN there reaches nothing."""
    layer = make_layer(device, bias=True)
    counted = min(max(count, 0), 13)
    cut = Layer(dict(layer.tensors), layer.expert_ids.clone(), layer.options)
    cut.expert_ids[counted:] = -1
    d_out = torch.randn_like(layer.tensors["x"])
    expected = results(cut, d_out)
    layer.tensors["x"][counted:] = torch.nan
    layer.tensors["router_weights"][counted:] = torch.nan
    layer.expert_ids[counted:] = torch.randint(-(2**30), 2**30, (13 - counted, 3), device=device)
    layer.expert_ids[counted:, 0] = 2
    assert_same(results(layer, d_out, num_tokens=one(device, count, torch.int64)), expected)
    assert not expected["out"][counted:].any()


@pytest.mark.parametrize("capacity", [0, 1, 4, 11])
def test_rows_that_do_not_fit_are_dropped_last_first_and_flagged(device, capacity):
    layer = make_layer(device, bias=True)
    order = moegemm.route(layer.expert_ids, 6)[1][: local_rows(layer)].long()
    assert len(order) > capacity
    kept = Layer(dict(layer.tensors), layer.expert_ids.clone(), layer.options)
    kept.expert_ids.view(-1)[order[capacity:]] = -1
    d_out = torch.randn_like(layer.tensors["x"])
    for dtype in (torch.int32, torch.int64):
        overflow = one(device, 0, dtype)
        assert_same(results(layer, d_out, max_rows=capacity, overflow=overflow), results(kept, d_out))
        assert overflow.item() == 1


def test_the_flag_is_left_alone_where_rows_fit(device):
    layer = make_layer(device)
    for before in (0, 1):  # of several layers one says for all that rows were dropped
        overflow = one(device, before).view(1)
        moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, overflow=overflow)
        assert overflow.item() == before


def test_check_names_the_first_row_that_is_dropped(device, monkeypatch):
    monkeypatch.setenv("MOEGEMM_CHECK", "1")
    layer = make_layer(device)
    layer.expert_ids.fill_(-1)
    layer.expert_ids[2] = torch.tensor([3, 0, 3], device=device)
    call = lambda rows: moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, max_rows=rows)  # noqa: E731
    call(3)
    with pytest.raises(ValueError, match=r"is 2, but 3 rows.*slot 2 of token 2 for expert 3"):
        call(2)


def test_a_rank_without_rows_gives_zeros_to_every_weight(device):
    layer = make_layer(device, bias=True)
    layer.expert_ids.fill_(6)
    for rows in (0, 5):
        got = results(layer, torch.randn_like(layer.tensors["x"]), max_rows=rows)
        assert all(value is not None and not value.any() for value in got.values())


class WatchRows(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest number of rows of any matrix that an operator makes."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function.namespace == "moegemm":
            for made in results if isinstance(results, tuple) else (results,):
                if made is not None and made.dim() == 2 and made.is_floating_point():
                    self.most = max(self.most, made.size(0))
        return results


def test_nothing_has_a_row_for_every_slot(device):
    layer = foreign(make_layer(device, tokens=40, topk=8, bias=True)).leaves()
    rows = local_rows(layer)
    saved: list[torch.Size] = []
    keep = lambda t: saved.append(t.shape) or t  # noqa: E731
    with WatchRows() as watched, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, **layer.options, max_rows=rows)
        out.sum().backward()
    assert watched.most == max(rows, 40) < 320
    assert {tuple(shape) for shape in saved if shape[-1] == 80} == {(rows, 80), (6, 80)}


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_without_graph_breaks(device, grad):
    layer = foreign(make_layer(device, bias=True))
    tensors = {name: t.requires_grad_(grad) for name, t in layer.leaves().tensors.items()}
    count, overflow = one(device, 11), one(device, 0)

    def run(tensors, ids, count, overflow):
        return moegemm.moe_mlp(**tensors, expert_ids=ids, max_rows=9, num_tokens=count, overflow=overflow)

    expected = run(tensors, layer.expert_ids, count, torch.zeros_like(overflow))
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for value in (11, 4):
        got = compiled(tensors, layer.expert_ids, count.fill_(value), overflow)
        eager_flag = torch.zeros_like(overflow)
        expected = run(tensors, layer.expert_ids, count, eager_flag)
        assert torch.equal(got, expected)
        assert overflow.item() >= eager_flag.item()
    if grad:
        wanted = list(tensors.values())
        mine, theirs = (torch.autograd.grad(t.square().sum(), wanted) for t in (got, expected))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_compiled_capacities_follow_the_number_of_tokens(device):
    """A capacity that is computed from a dynamic shape compiles once."""
    layer = foreign(make_layer(device, tokens=40))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, ids, weights: moegemm.moe_mlp(
            x, layer.tensors["w_gate_up"], layer.tensors["w_down"], ids, weights, max_rows=x.size(0) * 2
        ),
        backend="aot_eager", fullgraph=True, dynamic=True,
    )  # fmt: skip
    for tokens in (40, 17, 23):
        arguments = layer.tensors["x"][:tokens], layer.expert_ids[:tokens], layer.tensors["router_weights"][:tokens]
        expected = moegemm.moe_mlp(
            arguments[0], layer.tensors["w_gate_up"], layer.tensors["w_down"], *arguments[1:], max_rows=tokens * 2
        )
        assert torch.equal(compiled(*arguments), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_rows": -1}, ValueError, r"max_rows is -1; it must not be negative"),
        ({"max_rows": 2.0}, TypeError, r"max_rows is 2\.0 of type float; an int or None is accepted"),
        ({"max_rows": True}, TypeError, r"max_rows is True of type bool"),
        ({"max_rows": 2**40}, ValueError, r"max_rows is 1099511627776; .*int32, so that at most 2147483647 rows are"),
        ({"num_tokens": 3}, TypeError, r"num_tokens is 3 of type int; a torch\.Tensor is accepted"),
        ({"num_tokens": torch.tensor(3.0)}, TypeError, r"num_tokens has dtype fp32; accepted are int32 and int64"),
        ({"num_tokens": torch.tensor([3, 4])}, ValueError, r"num_tokens is int64\[2\] .*its shape must be \[1\]$"),
        ({"num_tokens": torch.tensor([[3]])}, ValueError, r"num_tokens is int64\[1, 1\] on cpu; its shape"),
        ({"num_tokens": torch.tensor(3, device="meta")}, TypeError, r"num_tokens is on meta; it must be on cpu"),
        ({"overflow": torch.tensor(False)}, TypeError, r"overflow has dtype Bool; accepted are"),
        ({"overflow": torch.zeros(0, dtype=torch.int32)}, ValueError, r"overflow is int32\[0\] on cpu; its shape"),
        ({"overflow": torch.tensor(0, device="meta")}, TypeError, r"overflow is on meta; it must be on cpu"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_name_the_argument_its_value_and_the_rule(options, error, message):
    layer = make_layer()
    with pytest.raises(error, match=message):
        moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, **options)
    with pytest.raises(error, match=message):
        moegemm.route(layer.expert_ids, 6, **options)


def test_a_refused_call_has_not_routed(device):
    """The flag of several layers would tell that rows were dropped."""
    layer = make_layer(device, hidden=32, inner=32)
    tensors = {**layer.tensors, "w_gate_up": moegemm.quantize(layer.tensors["w_gate_up"], "mxfp4")}
    tensors["x"].requires_grad_()
    overflow = one(device, 0)
    with pytest.raises(TypeError, match="with a weight in mxfp4"):
        moegemm.moe_mlp(
            **tensors, expert_ids=layer.expert_ids, max_rows=1, overflow=overflow,
            weight_gradients=moegemm.WeightGradients(),
        )  # fmt: skip
    assert overflow.item() == 0
