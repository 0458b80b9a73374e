"""Every public function on meta and fake tensors: the shapes, dtypes and devices of the real ones."""

import contextlib

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from raw_calls import RAW, raw_call
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

KINDS = ["meta", "fake"]


def without_memory(kind: str, tensors):
    """A tree of tensors as ones without memory, and the mode to use them in."""
    if kind == "meta":
        convert = lambda t: t.detach().to("meta").requires_grad_(t.requires_grad)  # noqa: E731
        return tree_map_only(torch.Tensor, convert, tensors), contextlib.nullcontext()
    mode = FakeTensorMode()
    return tree_map_only(torch.Tensor, mode.from_tensor, tensors), mode


def facts(results) -> list:
    flat = tree_leaves(results)
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in flat if t is not None]


def assert_same_facts(kind: str, call, tensors) -> None:
    """`call` takes a tree of tensors and returns one."""
    expected = facts(call(tensors))
    converted, mode = without_memory(kind, tensors)
    with mode:
        results = call(converted)
    devices = {t.device.type for t in tree_leaves(results) if t is not None}
    assert devices == {"meta" if kind == "meta" else "cpu"}
    assert facts(results) == expected


def with_gradients(call):
    """The results of `call` and the gradients of every tensor that requires one."""

    def run(tensors):
        out = call(tensors)
        wanted = [t for t in tree_leaves(tensors) if torch.is_tensor(t) and t.requires_grad]
        return out, *torch.autograd.grad(out.sum(), wanted)

    return run


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_gemm(kind, flags, grad):
    arguments = make_case(flags=flags, dtype=torch.bfloat16).arguments()
    if grad:
        for name in ("X", "W", "topk_weights"):
            if arguments[name] is not None:
                arguments[name].requires_grad_()
    call = lambda named: moegemm.grouped_gemm(**named)  # noqa: E731
    assert_same_facts(kind, with_gradients(call) if grad else call, arguments)


@pytest.mark.parametrize("options", [{"check": True}, {"autotune": True}, {"allow_tf32": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_options_of_grouped_gemm(kind, options):
    assert_same_facts(kind, lambda named: moegemm.grouped_gemm(**named, **options), make_case().arguments())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_product(kind, flat):
    X, W = torch.randn(6, 16), torch.randn(3, 8, 16, requires_grad=True)
    arguments = [X, W.detach().flatten(0, 1) if flat else W, torch.tensor([2, 0, 4])]
    assert_same_facts(kind, lambda a: moegemm.grouped_gemm(*a, 1), arguments)
    assert_same_facts(
        kind, lambda a: moegemm.GroupedGemm.apply(*a, None, None, (1, "", moegemm.autograd.DEFAULTS)), arguments
    )


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", RAW)
@pytest.mark.parametrize("kind", KINDS)
def test_raw_functions(kind, name, flags):
    case = make_case(flags=flags, dtype=torch.bfloat16)
    out = raw_call(name, case)

    def call(tensors):
        changed = type(case)(**tensors["case"])
        wide = raw_call(name, changed, out_dtype=torch.float32)
        return raw_call(name, changed), raw_call(name, changed, out=tensors["out"]), wide

    assert_same_facts(kind, call, {"case": dict(case.__dict__), "out": out})


@pytest.mark.parametrize("kind", KINDS)
def test_route_and_combine(kind):
    ids, rows, weights = torch.randint(4, (5, 2)), torch.randn(10, 6).bfloat16(), torch.rand(5, 2)

    def call(tensors):
        ids, rows, weights = tensors
        routed = moegemm.route(ids, 4, dtype=torch.int64, return_inverse=True)
        return routed, moegemm.combine(rows, weights), moegemm.combine(rows, topk=2, out_dtype=torch.float32)

    assert_same_facts(kind, call, [ids, rows, weights])
    leaves = [ids, rows.requires_grad_(), weights.requires_grad_()]
    assert_same_facts(kind, with_gradients(lambda t: moegemm.combine(t[1], t[2])), leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_route_and_combine_with_a_capacity(kind):
    ids, rows, weights = torch.randint(-1, 9, (5, 2)), torch.randn(7, 6).bfloat16(), torch.rand(5, 2)

    def call(tensors):
        ids, rows, weights = tensors
        routed = moegemm.route(ids, 4, return_inverse=True, max_rows=7, num_tokens=ids.sum(), overflow=ids.sum())
        return routed, moegemm.combine(rows, weights, positions=routed[2])

    assert_same_facts(kind, call, [ids, rows, weights])
    leaves = [ids, rows.requires_grad_(), weights.requires_grad_()]
    assert_same_facts(kind, with_gradients(lambda t: moegemm.combine(t[1], t[2], positions=t[0])), leaves)


def layer(bias: bool, transposed: bool, grad: bool) -> dict:
    shapes = {
        "x": (2, 5, 8),
        "w_gate_up": (3, 12, 8),
        "w_down": (3, 8, 6),
        "gate_up_bias": (3, 12),
        "down_bias": (3, 8),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items() if bias or "bias" not in name}
    if transposed:
        for name in ("w_gate_up", "w_down"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    tensors["router_weights"] = torch.rand(2, 5, 2)
    tensors = {name: t.requires_grad_(grad) for name, t in tensors.items()}
    return {**tensors, "expert_ids": torch.randint(-1, 3, (2, 5, 2)), "transposed": transposed}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_moe_mlp(kind, bias, transposed, grad):
    call = lambda named: moegemm.moe_mlp(**named)  # noqa: E731
    assert_same_facts(kind, with_gradients(call) if grad else call, layer(bias, transposed, grad))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_moe_mlp_with_a_capacity(kind, grad):
    named = {**layer(True, False, grad), "num_tokens": torch.tensor(7), "overflow": torch.tensor([0])}
    call = lambda named: moegemm.moe_mlp(**named, max_rows=5)  # noqa: E731
    assert_same_facts(kind, with_gradients(call) if grad else call, named)


@pytest.mark.parametrize("kind", KINDS)
def test_moe_mlp_that_accumulates(kind):
    tensors = layer(False, False, False)
    grads = [torch.zeros(tensors[name].shape) for name in ("w_gate_up", "w_down")]

    def call(everything):
        named, main_grads = everything
        for name, main_grad in zip(("w_gate_up", "w_down"), main_grads, strict=True):
            named[name] = named[name].detach().requires_grad_()
            named[name].main_grad = main_grad
        moegemm.moe_mlp(**named, accumulate=True).sum().backward()
        assert named["w_down"].grad is None
        return main_grads

    assert_same_facts(kind, call, (tensors, grads))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lora_moe_mlp(kind, grad):
    adapters = [moegemm.LoraAdapter(3, k, n, 2) for k, n in ((8, 12), (6, 8))]
    trained = [t.detach().requires_grad_(grad) for a in adapters for t in (a.A, a.B)]

    def call(everything):
        named, (a1, b1, a2, b2) = everything
        for adapter, a, b in ((adapters[0], a1, b1), (adapters[1], a2, b2)):
            adapter.__dict__.update(A=a, B=b)
            adapter._parameters.clear()
        return moegemm.lora_moe_mlp(**named, gate_up=adapters[0], down=adapters[1])

    assert_same_facts(kind, with_gradients(call) if grad else call, (layer(True, False, grad), trained))


def test_an_adapter_on_meta():
    adapter = moegemm.LoraAdapter(3, 8, 12, 2, device="meta")
    assert adapter.merged(torch.empty(3, 12, 8, device="meta")).shape == (3, 12, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_of_the_real_device_leaves_meta_tensors_alone(kind):
    (product, mlp), mode = without_memory(kind, (make_case().arguments(), layer(True, False, False)))
    expected = torch.float32 if kind == "meta" else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16), mode:
        assert moegemm.grouped_gemm(**product).dtype == expected
        assert moegemm.moe_mlp(**mlp).dtype == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tune_refuses_what_it_cannot_measure(kind):
    real = [torch.randn(6, 16), torch.randn(3, 8, 16), torch.tensor([2, 0, 4])]
    (X, W, m_sizes), mode = without_memory(kind, real)
    with mode, pytest.raises(ValueError, match="tensor; tune measures kernels"):
        moegemm.tune(X, W, m_sizes, 1)


@pytest.mark.parametrize("name", ["w_gate_up", "w_down", "expert_ids", "router_weights", "gate_up_bias", "down_bias"])
def test_one_meta_tensor_among_others_is_refused_by_the_layer(name):
    tensors = layer(True, False, False)
    tensors[name] = tensors[name].to("meta")
    for function in (moegemm.moe_mlp, moegemm.lora_moe_mlp):
        with pytest.raises(TypeError, match=f"{name} is on meta; it must be on cpu, where x is"):
            function(**tensors)
    everything = layer(True, False, False)
    rest = {k: v.to("meta") if torch.is_tensor(v) and k != name else v for k, v in everything.items()}
    with pytest.raises(TypeError, match=f"{name} is on cpu; it must be on meta, where x is"):
        moegemm.moe_mlp(**rest)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["X", "W", "m_sizes", "gather_indices", "topk_weights"])
def test_one_meta_tensor_among_others_is_refused_by_the_products(name, grad):
    case = make_case(flags="permute_y_mul")
    setattr(case, name, getattr(case, name).to("meta"))
    message = f"{name} is on meta; it must be on cpu, where X is" if name != "X" else "it must be on meta, where X is"
    case.W.requires_grad_(grad)
    with pytest.raises(TypeError, match=message):
        moegemm.grouped_gemm(**case.arguments())
    with pytest.raises(TypeError, match=r"is on (meta|cpu); it must be on (meta|cpu), where dY is"):
        torch.ops.moegemm.dx(
            torch.ones(26, 24), case.W.detach().to("meta"), case.m_sizes, case.gather_indices, None, 2, " permute_y"
        )


def test_one_meta_tensor_among_others_is_refused_by_combine():
    with pytest.raises(TypeError, match="weights is on meta; it must be on cpu, where rows is"):
        moegemm.combine(torch.ones(4, 3), torch.ones(2, 2, device="meta"))


def test_refusals_without_memory_have_the_librarys_words():
    case = make_case(flags="permute_x")
    real = case.arguments()
    meta = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in real.items()}
    for changes, message in (
        ({"gather_indices": None}, "gather_indices is None; permute_x=True needs it"),
        ({"topk": 3}, "with permute_x it must have T = M / topk rows, where M = 26 and topk = 3"),
    ):
        for call in (real, meta):
            with pytest.raises((ValueError, RuntimeError), match=message):
                moegemm.grouped_gemm(**{**call, **changes})
