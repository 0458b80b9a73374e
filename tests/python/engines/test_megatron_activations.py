"""The activation that Megatron's configuration asks for, with stand-ins for the parts of Megatron that ours reads."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

EXPERTS, WIDTH, INNER = 3, 8, 6


class StandIn(torch.nn.Module):
    """What MoegemmExperts takes from SequentialMLP: the experts' layers."""

    def __init__(self, num_local_experts, config, submodules, pg_collection) -> None:
        super().__init__()
        self.config = config
        columns = 2 * INNER if config.gated_linear_unit else INNER
        self.local_experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({
                "linear_fc1": torch.nn.Linear(WIDTH, columns, bias=False),
                "linear_fc2": torch.nn.Linear(INNER, WIDTH, bias=False),
            })
            for _ in range(num_local_experts)
        )  # fmt: skip
        for expert in self.local_experts:
            expert.linear_fc1, expert.linear_fc2 = expert["linear_fc1"], expert["linear_fc2"]


@pytest.fixture
def integration(monkeypatch):
    name = "megatron.core.transformer.moe.experts"
    stand_in = ModuleType(name)
    stand_in.SequentialMLP = StandIn
    monkeypatch.setitem(sys.modules, name, stand_in)
    found = importlib.util.find_spec("moegemm.integrations.megatron")
    # Under a name of its own: others may have it with the true Megatron.
    spec = importlib.util.spec_from_file_location("megatron_with_stand_ins", found.origin)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configuration(**changes) -> SimpleNamespace:
    options = {"gated_linear_unit": True, "activation_func": F.silu, "fp8": None, "moe_apply_probs_on_input": False}
    return SimpleNamespace(**{**options, **changes})


def experts_of(integration, config):
    groups = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1))
    return integration.MoegemmExperts(EXPERTS, config, None, groups)


@pytest.mark.parametrize(
    ("activation", "numbers"),
    [
        (F.silu, {}),
        (F.silu, {"activation_func_clamp_value": None, "glu_linear_offset": 0.0}),
        (F.silu, {"activation_func_clamp_value": 0.4}),
        (F.silu, {"glu_linear_offset": 1.0}),
        (F.silu, {"activation_func_clamp_value": 0.4, "glu_linear_offset": 1.0}),
        (F.gelu, {"activation_func_clamp_value": 0.4}),
    ],
)
def test_gates_are_clamped_and_ups_are_moved(integration, activation, numbers):
    experts = experts_of(integration, configuration(activation_func=activation, **numbers))
    rows, probabilities, counts = torch.randn(7, WIDTH) * 3, torch.rand(7), torch.tensor([3, 0, 4])
    found, _ = experts(rows, counts, probabilities)
    limit, offset = numbers.get("activation_func_clamp_value"), numbers.get("glu_linear_offset", 0.0)
    expected = []
    for x, expert in zip(rows.split(counts.tolist()), experts.local_experts, strict=True):
        gate, up = expert.linear_fc1(x).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        expected.append(expert.linear_fc2(activation(gate) * (up + offset)))
    assert torch.allclose(found, torch.cat(expected) * probabilities.unsqueeze(1), atol=1e-5)


@pytest.mark.parametrize("numbers", [{"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0}], ids=str)
def test_numbers_of_a_gate_are_refused_without_one(integration, numbers):
    experts_of(integration, configuration(gated_linear_unit=False, activation_func_clamp_value=None))
    with pytest.raises(ValueError, match="without gated_linear_unit they must be None and 0"):
        experts_of(integration, configuration(gated_linear_unit=False, **numbers))


def test_only_silu_moves_the_ups(integration):
    with pytest.raises(ValueError, match=r"glu_linear_offset is 1\.0 with gelu; only silu takes it"):
        experts_of(integration, configuration(activation_func=F.gelu, glu_linear_offset=1.0))
