"""Which activation a module has is found by asking it, and asked again when the answer may have changed."""

import copy
from importlib import import_module

import pytest
import torch
from tiny_models import build, experts_of, routing

experts_forward = import_module("moegemm.transformers").experts_forward
notices = import_module("moegemm.integrations.notices")
gates = import_module("moegemm.integrations.expert_modules.gates")

X = torch.linspace(-60, 60, 40 * 32).view(40, 32)


def gpt_oss_experts() -> torch.nn.Module:
    return experts_of(build("gpt_oss", "eager"))


def assert_runs_like_itself(experts: torch.nn.Module) -> None:
    """Our forward computes what the module's own does."""
    ids, weights = routing(4)
    expected = experts(X, ids, weights)
    got = experts_forward(experts, X, ids, weights)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("limit", [0.5, 7.0, 19.0, 20.0, 25.0, 1e3, 1e6, 1e12])
def test_a_limit_of_any_size_is_found(limit):
    experts = gpt_oss_experts()
    experts.limit = limit
    assert gates.activation_of(experts, True).limit == limit


def test_a_limit_of_twenty_or_more_is_applied():
    experts = gpt_oss_experts()
    experts.limit = 25.0
    assert_runs_like_itself(experts)


@pytest.mark.parametrize("limit", [5.0, 30.0, 1e3, 1e7])
def test_a_limit_that_no_attribute_tells_of_is_left_to_the_module(limit):
    experts = gpt_oss_experts()
    experts._apply_gate = lambda h: torch.nn.functional.silu(h[..., ::2].clamp(max=limit)) * h[..., 1::2]
    assert gates.activation_of(experts, True) is None


def test_a_limit_under_any_name_is_found():
    class Named(type(gpt_oss_experts())):
        ceiling = 31.0

        def _apply_gate(self, h):
            return torch.nn.functional.silu(h[..., ::2].clamp(max=self.ceiling)) * h[..., 1::2].clamp(
                -self.ceiling, self.ceiling
            )

    experts = gpt_oss_experts()
    experts.__class__ = Named
    assert gates.activation_of(experts, True).limit == 31.0
    experts.ceiling = 12.0
    assert gates.activation_of(experts, True).limit == 12.0


def test_setting_another_limit_takes_effect():
    experts = gpt_oss_experts()
    for limit in (7.0, 40.0, 3.0):
        experts.limit = limit
        assert_runs_like_itself(experts)


def test_setting_another_activation_takes_effect():
    experts = experts_of(build("qwen3_moe", "eager"))
    for act_fn in (experts.act_fn, torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.ReLU(), torch.nn.SiLU()):
        experts.act_fn = act_fn
        assert_runs_like_itself(experts)


@pytest.mark.parametrize(
    ("act_fn", "function"), [(torch.nn.SiLU(), "silu"), (torch.nn.GELU(), "gelu"), (torch.nn.ReLU(), "relu")]
)
def test_the_activations_of_torch_are_found(act_fn, function):
    experts = experts_of(build("qwen3_moe", "eager"))
    experts.act_fn = act_fn
    assert gates.activation_of(experts, True).function == function


def test_changing_an_activation_in_place_takes_effect():
    experts = experts_of(build("qwen3_moe", "eager"))
    experts.act_fn = torch.nn.GELU()
    exact = gates.activation_of(experts, True)
    experts.act_fn.approximate = "tanh"
    assert gates.activation_of(experts, True).function != exact.function


def test_setting_another_gate_takes_effect():
    experts = experts_of(build("qwen3_moe", "eager"))
    assert gates.activation_of(experts, True) is not None
    experts._apply_gate = lambda h: torch.sin(h[..., :24]) * h[..., 24:]
    assert gates.activation_of(experts, True) is None


def test_an_answer_is_kept_while_nothing_changes(monkeypatch):
    experts = gpt_oss_experts()
    found = gates.activation_of(experts, True)
    monkeypatch.setattr(gates, "_probe", lambda *a: pytest.fail("asked again"))
    assert gates.activation_of(experts, True) is found


def test_an_activation_that_learns_is_left_to_the_module():
    class Learned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, h):
            return torch.nn.functional.silu(h) * self.scale

    experts = experts_of(build("qwen3_moe", "eager"))
    experts.act_fn = Learned()
    assert gates.activation_of(experts, True) is None


@pytest.mark.smoke
@pytest.mark.parametrize("asked_before", [False, True], ids=["compiled first", "run first"])
def test_compiled_experts_follow_their_activation(asked_before):
    torch._dynamo.reset()
    experts = experts_of(build("qwen3_moe", "moegemm"))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    ids, weights = routing(6)
    for act_fn in (torch.nn.SiLU(), torch.nn.GELU(), torch.nn.GELU("tanh")):
        experts.act_fn = act_fn
        eager = copy.deepcopy(experts)
        eager.config._experts_implementation_internal = "eager"
        if asked_before:
            experts(X, ids, weights)
        torch.testing.assert_close(compiled(X, ids, weights), eager(X, ids, weights), rtol=1e-4, atol=1e-2)


@pytest.mark.smoke
def test_compiled_experts_follow_their_limit():
    torch._dynamo.reset()
    experts = experts_of(build("gpt_oss", "moegemm"))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    ids, weights = routing(4)
    for limit in (7.0, 30.0):
        experts.limit = limit
        eager = copy.deepcopy(experts)
        eager.config._experts_implementation_internal = "eager"
        torch.testing.assert_close(compiled(X, ids, weights), eager(X, ids, weights), rtol=1e-4, atol=1e-2)


def test_compiled_experts_run_a_gate_that_was_set_on_them():
    torch._dynamo.reset()
    experts = experts_of(build("qwen3_moe", "moegemm"))
    experts._apply_gate = lambda h: torch.sin(h[..., :24]) * h[..., 24:]
    ids, weights = routing(6)
    notices._said.clear()
    with pytest.warns(UserWarning, match="runs its activation in torch"):
        expected = experts(X, ids, weights)
    got = torch.compile(experts, fullgraph=True, backend="aot_eager")(X, ids, weights)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-2)
