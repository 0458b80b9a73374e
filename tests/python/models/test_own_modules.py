"""Modules outside every interface: what their own forward computes decides whether they are patched."""

import copy
import types
from importlib import import_module

import moegemm
import pytest
import torch
from own_experts import (
    KNOWN,
    REFUSED,
    Biased,
    BiasedInSingle,
    Clamped,
    DownInSingle,
    GatedByMethod,
    OwnExperts,
    Scaled,
    TanhGated,
)
from tiny_models import build, routing

notices = import_module("moegemm.integrations.notices")
own_modules = import_module("moegemm.integrations.expert_modules.own_modules")


def outputs(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and every gradient, on the same routing each time."""
    torch.manual_seed(1)
    ids, weights = routing(4)
    x = x.detach().requires_grad_()
    out = module(x, ids.to(x.device), weights.to(x.device, x.dtype))
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])]


@pytest.fixture(autouse=True)
def nothing_said():
    notices._said.clear()


@pytest.mark.filterwarnings("ignore:moegemm. TanhGated runs its activation in torch")
@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
def test_a_module_runs_as_its_own_forward_does(device, kind, monkeypatch):
    module = kind().to(device)
    x = torch.randn(40, 16, device=device) * 20  # beyond the limit of one of them
    expected = outputs(module, x)
    assert moegemm.patch(module) is module
    ran = []
    run_as = own_modules.run_as
    monkeypatch.setattr(own_modules, "run_as", lambda *a: ran.append(1) or run_as(*a))
    for got, wanted in zip(outputs(module, x), expected, strict=True):
        assert (got - wanted).norm() <= 2e-5 * wanted.norm()
    assert ran


class Flattening(OwnExperts):
    """One that takes [B, S, H] with flat ids and weights, as blocks that flatten for their router alone call it."""

    def forward(self, hidden_states, ids, weights):
        out = super().forward(hidden_states.reshape(-1, hidden_states.size(-1)), ids, weights)
        return out.view(hidden_states.shape)


class TanhFlattening(Flattening, TanhGated):
    pass


@pytest.mark.parametrize("kind", [Flattening, TanhFlattening])
def test_batches_with_flat_ids_run_as_in_the_own_forward(device, kind):
    module = kind().to(device)
    x = torch.randn(2, 20, 16, device=device)
    expected = outputs(module, x)
    with notices.unsaid():
        for got, wanted in zip(outputs(moegemm.patch(module), x), expected, strict=True):
            assert got.shape == wanted.shape
            assert (got - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_module_that_computes_something_else_is_refused_with_the_reason(kind):
    module = kind()
    before = type(module).forward
    with pytest.raises(ValueError, match=REFUSED[kind]):
        moegemm.patch(module)
    assert type(module) is kind
    assert type(module).forward is before


def test_a_refused_module_beside_others_runs_its_own_code_and_says_so():
    model = torch.nn.ModuleList([OwnExperts(), Scaled()])
    x = torch.randn(40, 16)
    expected = outputs(model[1], x)
    with pytest.warns(UserWarning, match="runs its own code: Scaled: its own forward computes something"):
        moegemm.patch(model)
    assert all(map(torch.equal, outputs(model[1], x), expected))
    assert [layer.on_moegemm for layer in moegemm.report(model).layers] == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [OwnExperts, Biased, GatedByMethod])
def test_sixteen_bit_modules_are_recognised(device, kind, dtype):
    module = kind().to(device, dtype)
    x = torch.randn(40, 16, device=device, dtype=dtype)
    expected = outputs(module, x)
    for got, wanted in zip(outputs(moegemm.patch(module), x), expected, strict=True):
        assert (got.float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_biases_in_another_dtype_than_the_weights_are_taken(device, dtype):
    module = BiasedInSingle().rounded(dtype).to(device)
    x = torch.randn(40, 16, device=device, dtype=dtype)
    expected = outputs(module, x)
    got = outputs(moegemm.patch(module), x)
    assert [mine.dtype for mine in got] == [wanted.dtype for wanted in expected]
    for mine, wanted in zip(got, expected, strict=True):
        assert (mine.float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm()


def test_a_module_that_the_layer_does_not_take_is_left_as_it_was():
    odd = DownInSingle()
    odd.gate_up_proj.data = odd.gate_up_proj.data.bfloat16()
    model, x = torch.nn.ModuleList([odd, OwnExperts()]), torch.randn(40, 16)
    expected = outputs(odd, x)
    with pytest.warns(
        UserWarning, match="DownInSingle: moegemm's layer does not run on its weights and biases: w_down"
    ):
        moegemm.patch(model)
    assert type(odd) is DownInSingle
    assert "_moegemm_form" not in vars(odd)
    assert all(map(torch.equal, outputs(odd, x), expected))
    assert [layer.on_moegemm for layer in moegemm.report(model).layers] == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_modules_with_a_factor_are_refused(dtype):
    with pytest.raises(ValueError, match="computes something else"):
        moegemm.patch(Scaled().to(dtype))


def test_comparing_changes_neither_mode_nor_random_numbers():
    module = OwnExperts().eval()
    state = torch.get_rng_state()
    moegemm.patch(module)
    assert not module.training
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_may_be_named_as_the_module_names_them():
    module = OwnExperts()
    ids, weights = routing(4)
    x = torch.randn(40, 16)
    expected = module(x, ids, weights)
    moegemm.patch(module)
    torch.testing.assert_close(module(tokens=x, chosen=ids, weights=weights), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module(x, ids, weights=weights), expected, rtol=1e-4, atol=1e-5)


def test_an_activation_that_no_kernel_has_runs_in_torch_and_says_so():
    module = moegemm.patch(TanhGated())
    with pytest.warns(UserWarning, match="TanhGated runs its activation in torch"):
        outputs(module, torch.randn(40, 16))


def test_setting_another_activation_of_a_patched_module_takes_effect():
    module = OwnExperts()
    own = copy.deepcopy(module)
    moegemm.patch(module)
    own.act_fn = module.act_fn = torch.nn.GELU()
    x = torch.randn(40, 16)
    for got, wanted in zip(outputs(module, x), outputs(own, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [OwnExperts, Biased])
def test_a_patched_module_compiles_as_one_graph(kind):
    torch._dynamo.reset()
    module = moegemm.patch(kind())
    ids, weights = routing(4)
    x = torch.randn(40, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ids, weights), module(x, ids, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.smoke
def test_compiled_modules_of_one_class_may_have_different_limits():
    torch._dynamo.reset()
    ids, weights = routing(4)
    x = torch.randn(40, 16) * 20
    compiled = torch.compile(lambda module: module(x, ids, weights), fullgraph=True, backend="aot_eager")
    for limit in (25.0, 9.0, 3.0):
        module = Clamped()
        module.limit = limit
        moegemm.patch(module)
        torch.testing.assert_close(compiled(module), module(x, ids, weights), rtol=1e-5, atol=1e-4)


def test_patching_again_changes_nothing():
    module = moegemm.patch(OwnExperts())
    kind = type(module)
    assert type(moegemm.patch(module)) is kind


def test_weights_without_numbers_are_refused():
    with pytest.raises(ValueError, match="its weights are on meta"):
        moegemm.patch(OwnExperts().to("meta"))


def test_hooks_of_accelerate_run_however_they_come_and_go():
    hooks = pytest.importorskip("accelerate.hooks")

    class Count(hooks.ModelHook):
        seen = 0

        def pre_forward(self, module, *args, **kwargs):
            self.seen += 1
            return args, kwargs

    module, hook = OwnExperts(), Count()
    arguments = (torch.randn(40, 16), *routing(4))
    expected = module(*arguments)
    hooks.add_hook_to_module(module, hook)
    moegemm.patch(module)
    hook.seen = 0
    torch.testing.assert_close(module(*arguments), expected, rtol=1e-4, atol=1e-5)
    assert hook.seen == 1
    hooks.remove_hook_from_module(module)
    assert moegemm.report(module).layers[0].on_moegemm
    moegemm.unpatch(module)
    assert torch.equal(module(*arguments), expected)
    moegemm.patch(module)
    torch.testing.assert_close(module(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_own_modules_need_no_transformers(monkeypatch):
    patching = import_module("moegemm.integrations.patching")
    monkeypatch.setattr(patching, "sys", types.SimpleNamespace(modules={}))
    monkeypatch.setattr(patching, "register", lambda: pytest.fail("registered"))
    moegemm.patch(OwnExperts())


class TestReport:
    def test_it_tells_which_layers_run_where_and_why(self):
        model = torch.nn.ModuleDict({"good": OwnExperts(), "scaled": Scaled(), "tanh": TanhGated()})
        with pytest.warns(UserWarning, match="Scaled"):
            moegemm.patch(model)
        good, scaled, tanh = moegemm.report(model).layers
        assert (good.name, good.kind, good.on_moegemm, good.reason) == ("good", "OwnExperts", True, "")
        assert not scaled.on_moegemm
        assert "computes something else" in scaled.reason
        assert tanh.on_moegemm
        assert "its activation runs in torch" in tanh.reason

    def test_it_reads_as_text(self):
        model = torch.nn.ModuleDict({"good": OwnExperts(), "scaled": Scaled()})
        with pytest.warns(UserWarning, match="Scaled"):
            moegemm.patch(model)
        lines = repr(moegemm.report(model)).splitlines()
        assert lines[0] == "1 of 2 expert layers run on moegemm"
        assert lines[1] == "  good (OwnExperts): moegemm"
        assert lines[2] == "  scaled (Scaled): own code"

    @pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
    def test_models_of_transformers(self, family):
        model = build(family, "eager")
        assert [layer.on_moegemm for layer in moegemm.report(model).layers] == [False, False]
        assert all(layer.reason for layer in moegemm.report(model).layers)
        assert [layer.on_moegemm for layer in moegemm.report(moegemm.patch(model)).layers] == [True, True]
        if family != "llama4":
            assert "torch.float64" in moegemm.report(model.double()).layers[0].reason

    def test_a_model_without_experts(self):
        assert moegemm.report(torch.nn.Linear(2, 2)).layers == ()


class TestUnpatch:
    def test_an_own_module_is_as_before(self):
        module = OwnExperts()
        attributes = set(vars(module))
        assert moegemm.unpatch(moegemm.patch(module)) is module
        assert type(module) is OwnExperts
        assert set(vars(module)) - attributes <= {"_moegemm_asked"}
        assert not moegemm.report(module).layers[0].on_moegemm

    @pytest.mark.parametrize(
        ("family", "before"),
        [("qwen3_moe", "eager"), ("qwen3_moe", "grouped_mm"), ("gpt_oss", "grouped_mm"), ("llama4", "eager")],
    )
    def test_models_of_transformers_get_back_what_they_had(self, family, before):
        model = build(family, before)
        kinds = [type(module) for module in model.modules()]
        moegemm.unpatch(moegemm.patch(model))
        assert [type(module) for module in model.modules()] == kinds
        assert model.config._experts_implementation == before
        assert not any(layer.on_moegemm for layer in moegemm.report(model).layers)

    @pytest.mark.parametrize("first", [0, 1])
    def test_models_with_one_config_get_back_what_it_had(self, first):
        one = build("qwen3_moe", "eager")
        two = type(one)._from_config(one.config)
        assert two.config is one.config
        for model in (one, two):
            moegemm.patch(model)
        for model in (one, two) if first == 0 else (two, one):
            moegemm.unpatch(model)
            assert model.config._experts_implementation == "eager"

    @pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
    def test_models_made_by_name_get_the_default(self, family):
        model = moegemm.unpatch(build(family, "moegemm"))
        assert not any(layer.on_moegemm for layer in moegemm.report(model).layers)

    def test_a_class_that_others_made_on_top_is_refused(self):
        module = moegemm.patch(OwnExperts())
        module.__class__ = type("Wrapped", (type(module),), {})
        with pytest.raises(ValueError, match="Wrapped was wrapped after it was patched"):
            moegemm.unpatch(module)

    def test_a_model_that_was_never_patched(self):
        moegemm.unpatch(torch.nn.Linear(2, 2))
