"""Adapters on experts: the same as experts whose weights have the low-rank product added."""

import copy

import moegemm
import pytest
import torch
from layer_reference import Layer, make_layer, reference_gradients, relative_error

EXPERTS, HIDDEN, INNER, RANK = 6, 24, 40, 8
SIXTEEN_BIT = 4 * torch.finfo(torch.bfloat16).eps / 2


def adapters(layer: Layer, dropout: float = 0.0) -> tuple[moegemm.LoraAdapter, moegemm.LoraAdapter]:
    """Both with a B that is not zero any more, in the layer's dtype."""
    x, gate_up = layer.tensors["x"], layer.tensors["w_gate_up"]
    columns = gate_up.size(2 if layer.options["transposed"] else 1)
    made = []
    for k, n in ((HIDDEN, columns), (INNER, HIDDEN)):
        adapter = moegemm.LoraAdapter(EXPERTS, k, n, RANK, 12.0, dropout, dtype=x.dtype, device=x.device)
        torch.nn.init.normal_(adapter.B, std=0.3)
        made.append(adapter)
    return made[0], made[1]


def run(layer: Layer, gate_up, down) -> torch.Tensor:
    t = layer.tensors
    return moegemm.lora_moe_mlp(
        t["x"], t["w_gate_up"], t["w_down"], layer.expert_ids, t["router_weights"], gate_up, down,
        gate_up_bias=t["gate_up_bias"], down_bias=t["down_bias"], **layer.options,
    )  # fmt: skip


def dense(layer: Layer, gate_up, down) -> Layer:
    """The layer with the adapters added to its weights."""
    merged = Layer(dict(layer.tensors), layer.expert_ids, layer.options)
    for name, adapter in (("w_gate_up", gate_up), ("w_down", down)):
        if adapter is None:
            continue
        delta = adapter.scaling * torch.bmm(adapter.B.detach().double(), adapter.A.detach().double())
        w = layer.tensors[name].double()
        merged.tensors[name] = w + (delta.transpose(1, 2) if layer.options["transposed"] else delta)
    return merged


@pytest.mark.parametrize("which", ["both", "gate_up", "down"])
@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_matches_experts_with_the_product_added(device, activation, transposed, which):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = make_layer(device, dtype, activation=activation, transposed=transposed, bias=activation != "swiglu")
    gate_up, down = adapters(layer)
    gate_up, down = (gate_up if which != "down" else None), (down if which != "gate_up" else None)
    trained = [p for a in (gate_up, down) if a is not None for p in (a.A, a.B)]
    leaves = layer.leaves()
    for name in ("w_gate_up", "w_down", "gate_up_bias", "down_bias"):
        if leaves.tensors[name] is not None:
            leaves.tensors[name].requires_grad_(False)
    d_out = torch.randn_like(layer.tensors["x"])
    inputs = [leaves.tensors["x"], leaves.tensors["router_weights"]]
    out = run(leaves, gate_up, down)
    gradients = torch.autograd.grad(out, [*inputs, *trained], d_out)

    exact = reference_gradients(dense(layer, gate_up, down), d_out)
    limit = 2e-5 if dtype == torch.float32 else SIXTEEN_BIT
    assert relative_error(out.detach(), exact["out"]) <= limit
    assert relative_error(gradients[0], exact["x"]) <= limit
    assert relative_error(gradients[1], exact["router_weights"]) <= limit
    position = 2
    for name, adapter in (("w_gate_up", gate_up), ("w_down", down)):
        if adapter is None:
            continue
        d_w = exact[name].transpose(1, 2) if transposed else exact[name]  # [E, N, K]
        a, b = adapter.A.detach().double(), adapter.B.detach().double()
        assert relative_error(gradients[position], adapter.scaling * b.transpose(1, 2) @ d_w) <= limit
        assert relative_error(gradients[position + 1], adapter.scaling * d_w @ a.transpose(1, 2)) <= limit
        position += 2


def test_a_new_adapter_changes_nothing(device):
    layer = make_layer(device, torch.bfloat16)
    fresh = moegemm.LoraAdapter(EXPERTS, HIDDEN, 2 * INNER, RANK, dtype=torch.bfloat16, device=device)
    t = layer.tensors
    plain = moegemm.moe_mlp(t["x"], t["w_gate_up"], t["w_down"], layer.expert_ids, t["router_weights"], **layer.options)
    assert torch.equal(run(layer, fresh, None), plain)


class CountWeightGradients(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function._schema.name == "moegemm::dw":
            self.shapes.append(tuple(result.shape))
        return result


def test_only_the_adapters_get_weight_gradients(device):
    layer = make_layer(device)
    gate_up, down = adapters(layer)
    out = run(layer, gate_up, down)
    with CountWeightGradients() as counted:
        out.sum().backward()
    low_rank = {(EXPERTS, RANK, HIDDEN), (EXPERTS, 2 * INNER, RANK), (EXPERTS, RANK, INNER), (EXPERTS, HIDDEN, RANK)}
    assert set(counted.shapes) == low_rank
    assert len(counted.shapes) == 4


def plain_layer(layer: Layer, lows: dict[str, list], dropped: dict[str, list]) -> torch.Tensor:
    """The definition in float64, expert by expert: `dropped` are the masks of each adapter's input, scaled."""
    t = {name: tensor.double() for name, tensor in layer.given().items()}
    x, ids = t["x"], layer.expert_ids
    out = torch.zeros_like(x)
    position = dict(zip(sorted_slots(layer), range(ids.numel()), strict=False))
    for token in range(ids.size(0)):
        for slot in range(ids.size(1)):
            e = int(ids[token, slot])
            if not 0 <= e < EXPERTS:
                continue
            pre = t["w_gate_up"][e] @ x[token]
            for low, mask in zip(lows["gate_up"], dropped["gate_up"], strict=True):
                pre = pre + low.scaling * low.B[e].double() @ (low.A[e].double() @ (mask[token] * x[token]))
            act = torch.nn.functional.silu(pre[:INNER]) * pre[INNER:]
            y = t["w_down"][e] @ act
            row = position[(token, slot)]
            for low, mask in zip(lows["down"], dropped["down"], strict=True):
                y = y + low.scaling * low.B[e].double() @ (low.A[e].double() @ (mask[row] * act))
            out[token] += t["router_weights"][token, slot] * y
    return out


def sorted_slots(layer: Layer) -> list[tuple[int, int]]:
    """(token, slot) of each row in expert order."""
    ids = layer.expert_ids.cpu()
    slots = [(t, s) for t in range(ids.size(0)) for s in range(ids.size(1)) if 0 <= ids[t, s] < EXPERTS]
    return sorted(slots, key=lambda at: (int(ids[at]), at))


def mask_of(shape: tuple[int, ...], p: float, device: str) -> torch.Tensor:
    return torch.nn.functional.dropout(torch.ones(shape, device=device), p, True).double()


def test_dropout_acts_on_the_adapters_input_in_training_only(device):
    """The first product's adapters drop elements of tokens, the second's of activated rows, each its own."""
    layer = make_layer(device)
    chosen = {"gate_up": [0.5, 0.25], "down": [0.3, 0.0]}
    lows = {name: [adapters(layer, p)[name == "down"] for p in dropouts] for name, dropouts in chosen.items()}
    whole = {name: [torch.ones(1000, 1, device=device)] * 2 for name in chosen}
    for adapter in (*lows["gate_up"], *lows["down"]):
        adapter.eval()
    expected = plain_layer(layer, lows, whole)
    assert relative_error(run(layer, lows["gate_up"], lows["down"]).detach(), expected) <= 2e-5
    for adapter in (*lows["gate_up"], *lows["down"]):
        adapter.train()
    torch.manual_seed(3)
    got = run(layer, lows["gate_up"], lows["down"])
    torch.manual_seed(3)
    shapes = {"gate_up": (13, HIDDEN), "down": (layer.expert_ids.numel(), INNER)}
    masks = {
        name: [mask_of(shapes[name], p, device) if p else whole[name][0] for p in dropouts]
        for name, dropouts in chosen.items()
    }
    assert relative_error(got.detach(), plain_layer(layer, lows, masks)) <= 2e-5
    assert relative_error(got.detach(), expected) > 1e-2


def test_gradients_with_dropout_are_those_of_the_same_mask(device):
    layer = make_layer(device)
    gate_up, down = adapters(layer, 0.4)
    x = layer.tensors["x"].clone().requires_grad_()
    layer.tensors["x"] = x

    def loss():
        torch.manual_seed(5)
        return run(layer, gate_up, down).square().sum()

    leaves = [x, gate_up.A, gate_up.B, down.A, down.B]
    gradients = torch.autograd.grad(loss(), leaves)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        direction = torch.randn_like(leaf)
        step = 1e-3
        with torch.no_grad():
            leaf.add_(direction, alpha=step)
            above = loss()
            leaf.sub_(direction, alpha=2 * step)
            below = loss()
            leaf.add_(direction, alpha=step)
        slope = ((above - below) / (2 * step)).item()
        assert slope == pytest.approx((gradient * direction).sum().item(), rel=2e-2, abs=1e-2)


@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
def test_several_adapters_of_different_ranks_count_together(device, transposed):
    """Ranks 1, 5 and 16 with scalings of their own, of alpha / r and of rsLoRA."""
    layer = make_layer(device, transposed=transposed)
    made = {"gate_up": [], "down": []}
    for name, (k, n) in {"gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}.items():
        for rank, rslora in ((1, False), (5, True), (16, False)):
            adapter = moegemm.LoraAdapter(EXPERTS, k, n, rank, alpha=3.0, device=device, use_rslora=rslora)
            torch.nn.init.normal_(adapter.B, std=0.3)
            made[name].append(adapter)
    assert made["down"][1].scaling == pytest.approx(3.0 / 5**0.5)
    leaves = [p for adapters_ in made.values() for a in adapters_ for p in (a.A, a.B)]
    d_out = torch.randn_like(layer.tensors["x"])
    out = run(layer, made["gate_up"], made["down"])
    gradients = torch.autograd.grad(out, leaves, d_out)
    whole = layer
    for i in range(3):
        whole = dense(whole, made["gate_up"][i], made["down"][i])
    exact = reference_gradients(whole, d_out)
    assert relative_error(out.detach(), exact["out"]) <= 2e-5
    found = iter(gradients)
    for name, w in (("gate_up", "w_gate_up"), ("down", "w_down")):
        d_w = exact[w].transpose(1, 2) if transposed else exact[w]
        for adapter in made[name]:
            a, b = adapter.A.detach().double(), adapter.B.detach().double()
            assert relative_error(next(found), adapter.scaling * b.transpose(1, 2) @ d_w) <= 2e-5
            assert relative_error(next(found), adapter.scaling * d_w @ a.transpose(1, 2)) <= 2e-5


def test_fp32_adapters_beside_16_bit_experts_keep_their_gradients_in_fp32(device):
    """The products read the parameters in the experts' dtype, and round no gradient."""
    layer = make_layer(device, torch.bfloat16)
    gate_up, down = adapters(layer)
    wide = [copy.deepcopy(adapter).float() for adapter in (gate_up, down)]
    d_out = torch.randn_like(layer.tensors["x"])
    found = []
    for pair in ((gate_up, down), wide):
        out = run(layer, *pair)
        found.append((out, torch.autograd.grad(out, [p for a in pair for p in (a.A, a.B)], d_out)))
    assert torch.equal(found[0][0], found[1][0])
    for narrow, exact in zip(found[0][1], found[1][1], strict=True):
        assert exact.dtype == torch.float32
        assert narrow.dtype == torch.bfloat16
        assert relative_error(narrow, exact.double()) <= 2**-8
        assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_router_and_experts_get_gradients_where_they_train(device, frozen):
    layer = make_layer(device, bias=True)
    gate_up, down = adapters(layer)
    leaves = layer.leaves()
    for tensor in leaves.given().values():
        tensor.requires_grad_(not frozen)
    d_out = torch.randn_like(layer.tensors["x"])
    run(leaves, gate_up, down).backward(d_out)
    assert gate_up.A.grad is not None
    assert down.B.grad is not None
    exact = reference_gradients(dense(layer, gate_up, down), d_out)
    for name, tensor in leaves.given().items():
        if frozen:
            assert tensor.grad is None
        else:
            assert relative_error(tensor.grad, exact[name]) <= 2e-5, name


def kept_bytes(layer: Layer, gate_up, down) -> int:
    """Everything saved that is not an argument."""
    arguments = {t.data_ptr() for t in (*layer.given().values(), *gate_up.parameters(), *down.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor):
        if tensor.data_ptr() not in arguments:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(layer, gate_up, down)
    return sum(kept.values())


@pytest.mark.parametrize("tokens", [64, 512, 4096])
@pytest.mark.parametrize("wide", [False, True], ids=["16-bit", "fp32"])
def test_what_is_kept_is_that_of_the_frozen_layer_and_a_little(device, tokens, wide):
    """The first product, two thin ones and the routing; weights of fp32 adapters in 16 bits only beside many rows."""
    layer = make_layer(device, torch.bfloat16, tokens=tokens)
    gate_up, down = adapters(layer)
    if wide:
        gate_up, down = gate_up.float(), down.float()
    layer.tensors["x"].requires_grad_()
    rows = layer.expert_ids.numel()
    frozen = 2 * rows * 2 * INNER + 4 * (rows + EXPERTS)
    thin = 2 * rows * 2 * RANK
    pairs = 2 * sum(p.numel() for adapter in (gate_up, down) for p in adapter.parameters())
    kept = kept_bytes(layer, gate_up, down)
    assert kept in (frozen + thin, frozen + thin + pairs)
    if kept > frozen + thin:
        assert wide
        assert thin + pairs <= 0.15 * (frozen + 2 * layer.tensors["x"].numel())


class FullWidth(torch.utils._python_dispatch.TorchDispatchMode):
    """What torch does to rows as wide as a product, besides moegemm's operators."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.seen = rows, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function._schema.name.startswith("moegemm::") and isinstance(result, torch.Tensor):
            wide = result.dim() == 2 and result.size(0) == self.rows and result.size(1) > RANK
            if wide and function._schema.name not in ("aten::detach", "aten::view", "aten::alias"):
                self.seen.append(function._schema.name)
        return result


def test_no_rows_are_added_scaled_or_copied_between_the_products(device):
    layer = make_layer(device, torch.bfloat16)
    gate_up, down = adapters(layer)
    layer.tensors["x"].requires_grad_()
    with FullWidth(layer.expert_ids.numel()) as mode:
        run(layer, gate_up, down).sum().backward()
    assert mode.seen == []


def test_a_capacity_gives_the_same(device):
    layer = make_layer(device)
    gate_up, down = adapters(layer)
    leaves = [gate_up.A, gate_up.B, down.A, down.B]
    t = layer.tensors
    t["x"].requires_grad_()
    valid = int(((layer.expert_ids >= 0) & (layer.expert_ids < EXPERTS)).sum())
    found = []
    for max_rows in (None, valid):
        out = moegemm.lora_moe_mlp(
            t["x"], t["w_gate_up"], t["w_down"], layer.expert_ids, t["router_weights"], gate_up, down,
            max_rows=max_rows, **layer.options,
        )  # fmt: skip
        found.append((out, *torch.autograd.grad(out.square().sum(), [t["x"], *leaves])))
    for whole, compact in zip(*found, strict=True):
        torch.testing.assert_close(compact, whole, rtol=1e-5, atol=1e-6)


def test_inference_gives_the_bits_of_training(device):
    layer = make_layer(device, torch.bfloat16)
    gate_up, down = adapters(layer)
    trained = run(layer, gate_up, down)
    with torch.no_grad():
        assert torch.equal(run(layer, gate_up, down), trained)


@pytest.mark.smoke
def test_compiles_as_one_graph(device):
    torch._dynamo.reset()
    layer = make_layer(device, torch.bfloat16)
    gate_up, down = adapters(layer)
    expected = run(layer, gate_up, down)
    compiled = torch.compile(lambda: run(layer, gate_up, down), fullgraph=True, backend="aot_eager")()
    assert torch.equal(compiled, expected)


def test_merged_weights_serve_alone(device):
    layer = make_layer(device)
    gate_up, down = adapters(layer)
    t = layer.tensors
    merged = moegemm.moe_mlp(
        t["x"], gate_up.merged(t["w_gate_up"]), down.merged(t["w_down"]), layer.expert_ids, t["router_weights"]
    )
    torch.testing.assert_close(run(layer, gate_up, down), merged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True], ids=["EnK", "EKn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unmerging_undoes_merging_but_for_roundings(device, dtype, transposed):
    layer = make_layer(device, dtype, transposed=transposed)
    adapter, _ = adapters(layer)
    w = layer.tensors["w_gate_up"]
    merged = adapter.merged(w, transposed)
    delta = adapter.scaling * torch.bmm(adapter.B.double(), adapter.A.double())
    exact = w.double() + (delta.transpose(1, 2) if transposed else delta)
    roundoff = torch.finfo(dtype).eps / 2
    assert ((merged.double() - exact).abs() <= roundoff * exact.abs() + 1e-6).all()  # fp32 sums of numbers around 1
    error = (adapter.unmerged(merged, transposed).double() - w.double()).abs()
    assert (error <= 2.1 * roundoff * torch.maximum(exact.abs(), w.double().abs()) + 1e-5).all()
    with pytest.raises(ValueError, match=r"w is .*; its shape must be \[E, "):
        adapter.merged(w[:, :, 1:], transposed)


def test_merging_inside_autocast_rounds_to_the_dtype_of_the_weight_alone(device):
    layer = make_layer(device)
    adapter, _ = adapters(layer)
    w = layer.tensors["w_gate_up"]
    functions = (adapter.merged, adapter.unmerged, torch.compile(adapter.merged, backend="eager", fullgraph=True))
    for function in functions:
        expected = function(w)
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(function(w), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: moegemm.LoraAdapter(4, 8, 8, rank=0), "rank is 0"),
        (lambda: moegemm.LoraAdapter(4, 8, 8, rank=2, dropout=1.0), "dropout is 1.0"),
        (lambda: run(make_layer(), moegemm.LoraAdapter(EXPERTS, 7, 80, 4), None), r"gate_up has A \[6, 4, 7\]"),
        (lambda: run(make_layer(), None, moegemm.LoraAdapter(EXPERTS, INNER, 7, 4)), r"down has B \[6, 7, 4\]"),
        (lambda: run(make_layer(), moegemm.LoraAdapter(5, HIDDEN, 80, 4), None), r"gate_up has A \[5, 4, 24\].*\[6, r"),
        (
            lambda: run(make_layer(), moegemm.LowRank(torch.zeros(6, 0, 24), torch.zeros(6, 80, 0), 1.0), None),
            r"gate_up has A \[6, 0, 24\]; its rank r must be at least 1",
        ),
    ],
)
def test_refusals_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_adapter_of_another_kind_is_named():
    layer, adapter = make_layer(), moegemm.LoraAdapter(EXPERTS, 24, 80, 4)
    adapter.B.data = adapter.B.data.half()
    with pytest.raises(
        TypeError, match=r"gate_up\.B has dtype torch.float16; it must have .*, the dtype of gate_up\.A"
    ):
        run(layer, adapter, None)
    adapter.A.data = adapter.A.data.half()
    with pytest.raises(TypeError, match=r"gate_up\.A has dtype torch.float16; it must have torch.float32"):
        run(layer, adapter, None)
    with pytest.raises(TypeError, match=r"gate_up is 3 of type int; a LoraAdapter, a LowRank"):
        run(layer, [3], None)
    with pytest.raises(TypeError, match=r"down\.A is on meta; it must be on cpu, where x is"):
        run(layer, None, moegemm.LoraAdapter(EXPERTS, INNER, 24, 4, device="meta"))
