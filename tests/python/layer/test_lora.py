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


def test_dropout_acts_on_the_adapters_input_in_training_only(device):
    layer = make_layer(device)
    gate_up, _ = adapters(layer, dropout=0.5)
    t = layer.tensors
    gate_up.eval()
    assert relative_error(run(layer, gate_up, None).detach(), reference_gradients(
        dense(layer, gate_up, None), torch.ones_like(t["x"])
    )["out"]) <= 2e-5  # fmt: skip
    gate_up.train()
    torch.manual_seed(3)
    got = run(layer, gate_up, None)
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(t["x"], 0.5, True)
    # By linearity of the first product: the adapter alone, on the dropped tokens, added to the frozen expert's.
    no_dropout = copy.deepcopy(gate_up).eval()
    both = torch.cat([t["x"], dropped], dim=1)
    zero = torch.zeros_like(t["w_gate_up"])
    delta = no_dropout.scaling * torch.bmm(no_dropout.B, no_dropout.A).detach()
    stacked = torch.cat([t["w_gate_up"], delta + zero], dim=2)
    # out = down(act(x W^T + dropped delta^T)): a layer with twice the columns, of which only the first leave it.
    wide_down = torch.cat([t["w_down"], torch.zeros_like(t["w_down"])], dim=1)
    wide = moegemm.moe_mlp(both, stacked, wide_down, layer.expert_ids, t["router_weights"])
    assert relative_error(got.detach(), wide[:, :HIDDEN].double()) <= 2e-5


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: moegemm.LoraAdapter(4, 8, 8, rank=0), "rank is 0"),
        (lambda: moegemm.LoraAdapter(4, 8, 8, rank=2, dropout=1.0), "dropout is 1.0"),
        (lambda: run(make_layer(), moegemm.LoraAdapter(EXPERTS, 7, 80, 4), None), r"gate_up has A \[6, 4, 7\]"),
        (lambda: run(make_layer(), None, moegemm.LoraAdapter(EXPERTS, INNER, 7, 4)), r"down has B \[6, 7, 4\]"),
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
    with pytest.raises(TypeError, match=r"down\.A is on meta; it must be on cpu, where x is"):
        run(layer, None, moegemm.LoraAdapter(EXPERTS, INNER, 24, 4, device="meta"))


def test_peft_adapters_on_expert_parameters():
    """peft adds its low-rank product to the parameter before the experts read it: any implementation works."""
    peft = pytest.importorskip("peft")
    from tiny_models import build, outputs_and_gradients, token_ids

    if "target_parameters" not in peft.LoraConfig.__dataclass_fields__:
        pytest.skip(f"peft {peft.__version__} cannot target parameters")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    found = {}
    for implementation in ("eager", "moegemm"):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_parameters=names, init_lora_weights=False, lora_dropout=0.0)
        if implementation == "moegemm":
            import moegemm.transformers  # noqa: F401 - registers the implementation
        torch.manual_seed(5)
        model = peft.get_peft_model(build("qwen3_moe", implementation), config)
        found[implementation] = outputs_and_gradients(model, token_ids())
    assert any("lora_A" in name for name in found["eager"])
    assert found["eager"].keys() == found["moegemm"].keys()
    for name, expected in found["eager"].items():
        torch.testing.assert_close(found["moegemm"][name], expected, rtol=1e-3, atol=1e-5, msg=name)
