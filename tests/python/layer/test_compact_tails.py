"""Rows of a capacity that no position names: nobody writes them, and what is there reaches nothing."""

import moegemm
import pytest
import torch
from layer_reference import Layer, make_layer, relative_error
from test_compact_layer import assert_same, foreign, local_rows, one, results

SPARE = 217  # so many rows more than there are: no other tensor of these layers has as many


class PoisonTails(torch.utils._python_dispatch.TorchDispatchMode):
    """After each operator NaN in the rows of its results from `used` on, where they have `rows` rows; `words` are the
    texts that such operators were given."""

    def __init__(self, used: int, rows: int) -> None:
        super().__init__()
        self.used, self.rows = used, rows
        self.words: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.namespace != "moegemm" or "route" in function._schema.name:
            return made
        written = [arg for arg in args if isinstance(arg, torch.Tensor)] if "_out" in function._schema.name else []
        written += list(made) if isinstance(made, (tuple, list)) else [made]
        ours = [t for t in written if t is not None and t.dim() == 2 and t.size(0) == self.rows]
        for tensor in (t for t in ours if t.is_floating_point()):
            tensor[self.used :] = torch.nan
        if ours:
            self.words.append(" ".join(arg for arg in args if isinstance(arg, str)))
        return made


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The output is the same; dW adds up rows in an order of its plan's choice."""
    assert torch.equal(got[0], expected[0])
    for mine, wanted in zip(got, expected, strict=True):
        assert relative_error(mine, wanted.double()) <= torch.finfo(wanted.dtype).eps


def poisoned(layer: Layer, d_out: torch.Tensor, used: int, rows: int, **options) -> dict[str, torch.Tensor]:
    with PoisonTails(used, rows) as mode:
        got = results(layer, d_out, max_rows=rows, **options)
    if rows > 0:
        assert mode.words
        assert all("tails_undefined" in words for words in mode.words)
    return got


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [1, 3])
def test_no_gradient_depends_on_them(device, topk, dtype, transposed, weighted, bias):
    layer = foreign(make_layer(device, dtype, tokens=31, topk=topk, transposed=transposed, bias=bias))
    if not weighted:
        layer.tensors["router_weights"] = None
    d_out, used = torch.randn_like(layer.tensors["x"]), local_rows(layer)
    expected = results(layer, d_out, max_rows=used)
    assert_same(poisoned(layer, d_out, used, used + SPARE), expected)
    with torch.no_grad(), PoisonTails(used, used + SPARE):
        out = moegemm.moe_mlp(**layer.tensors, expert_ids=layer.expert_ids, **layer.options, max_rows=used + SPARE)
    assert torch.equal(out, expected["out"])


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "relu2"])
def test_activations(device, activation):
    layer = foreign(make_layer(device, torch.bfloat16, activation=activation, bias=True))
    d_out, used = torch.randn_like(layer.tensors["x"]), local_rows(layer)
    assert_same(poisoned(layer, d_out, used, used + SPARE), results(layer, d_out))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("strides", ["alike", "apart"])
def test_pairs_of_gate_and_up(device, quantised, strides):
    """Of one operator, of two, and of two whose gradients are added up."""
    layer = foreign(make_layer(device, torch.bfloat16, hidden=64, inner=64, bias=True))
    used, tensors = local_rows(layer), dict(layer.tensors)
    gate, up = (half.contiguous() for half in tensors["w_gate_up"].chunk(2, 1))
    if strides == "apart":
        up = up.transpose(1, 2).contiguous().transpose(1, 2)
    tensors["w_gate_up"] = tuple(moegemm.quantize(w, "mxfp4") for w in (gate, up)) if quantised else (gate, up)
    tensors["gate_up_bias"] = tuple(half.contiguous() for half in tensors["gate_up_bias"].chunk(2, 1))
    leaves = [tensors["x"], tensors["router_weights"], tensors["down_bias"], tensors["w_down"]]
    leaves += [] if quantised else [gate, up]
    for leaf in leaves:
        leaf.requires_grad_()
    found = []
    for rows in (used, used + SPARE):
        with PoisonTails(used, used + SPARE):
            out = moegemm.moe_mlp(**tensors, expert_ids=layer.expert_ids, **layer.options, max_rows=rows)
            found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    assert_close(*reversed(found))


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_dropped_rows(device, capacity):
    """The rows that fit are all in use."""
    layer = make_layer(device, bias=True)
    order = moegemm.route(layer.expert_ids, 6)[1][: local_rows(layer)].long()
    kept = Layer(dict(layer.tensors), layer.expert_ids.clone(), layer.options)
    kept.expert_ids.view(-1)[order[capacity:]] = -1
    d_out = torch.randn_like(layer.tensors["x"])
    assert_same(poisoned(layer, d_out, capacity, capacity), results(kept, d_out))


@pytest.mark.parametrize("count", [0, 5])
def test_rows_of_absent_tokens(device, count):
    layer = make_layer(device, bias=True)
    cut = Layer(dict(layer.tensors), layer.expert_ids.clone(), layer.options)
    cut.expert_ids[count:] = -1
    d_out = torch.randn_like(layer.tensors["x"])
    got = poisoned(layer, d_out, local_rows(cut), SPARE, num_tokens=one(device, count))
    assert_same(got, results(cut, d_out))
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [True, False])
def test_adapters(device, frozen, dtype):
    layer = foreign(make_layer(device, dtype, tokens=31, bias=True))
    used, t = local_rows(layer), layer.tensors
    gate_up, down = (moegemm.LoraAdapter(6, k, n, 5, device=device) for k, n in ((24, 80), (40, 24)))
    torch.nn.init.normal_(gate_up.B)
    torch.nn.init.normal_(down.B)
    leaves = [t["x"], t["router_weights"], *gate_up.parameters(), *down.parameters()]
    leaves += [] if frozen else [w for name, w in t.items() if name not in ("x", "router_weights")]
    for leaf in leaves:
        leaf.requires_grad_()
    found = []
    for rows in (used, used + SPARE):
        with PoisonTails(used, used + SPARE) as mode:
            call = lambda: moegemm.lora_moe_mlp(  # noqa: E731
                **t,
                expert_ids=layer.expert_ids,
                gate_up=gate_up,
                down=down,
                **layer.options,
                max_rows=rows,  # noqa: B023
            )
            out = call()
            gradients = torch.autograd.grad(out.sin().sum(), leaves)
            with torch.no_grad():
                inference = call()
        found.append([out.detach(), inference, *gradients])
    assert mode.words
    assert all("tails_undefined" in words for words in mode.words)
    assert_close(*reversed(found))


def test_extents_that_products_copy_keep_zeros(device):
    """Into alignment, with all rows."""
    layer = foreign(make_layer(device, hidden=20, bias=True))
    d_out, used = torch.randn_like(layer.tensors["x"]), local_rows(layer)
    with PoisonTails(used, used + SPARE) as mode:
        got = results(layer, d_out, max_rows=used + SPARE)
    assert mode.words
    assert not any("tails_undefined" in words for words in mode.words)
    assert_same(got, results(layer, d_out))
