"""Megatron-Core's SequentialMLP beside ours, with its own configuration, parameters and checkpoints, on the CPU."""

import warnings
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Megatron, which looks for its other packages
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    pytest.importorskip("megatron.core.transformer.moe.experts", reason="it does not import", exc_type=ImportError)
    integration = import_module("moegemm.integrations.megatron")


@pytest.fixture
def one_rank():
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def experts_of(kind, groups, **changes):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_moe_experts": 4, "moe_ffn_hidden_size": 24,
        "ffn_hidden_size": 24, "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "use_cpu_initialization": True, "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False, "params_dtype": torch.float32,
    }  # fmt: skip
    config = TransformerConfig(**{**options, **changes})
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    made = kind(4, config, submodules, groups)
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    return made


def outputs(experts, owner=None) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    rows = torch.randn(11, 16, generator=random, requires_grad=True)
    probabilities = torch.rand(11, generator=random, requires_grad=True)
    out, bias = experts(rows, torch.tensor([4, 0, 5, 2]), probabilities)
    assert bias is None
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in (owner or experts).named_parameters()}
    return {"out": out.detach(), "d rows": rows.grad, "d probabilities": probabilities.grad, **gradients}


def plain(experts, rows: torch.Tensor, counts: torch.Tensor, probabilities: torch.Tensor):
    """One expert after another, as SequentialMLP does it. Its own biases cannot be differentiated on the CPU."""
    parts = []
    pieces = zip(rows.split(counts.tolist()), probabilities.split(counts.tolist()), experts.local_experts, strict=True)
    for x, p, expert in pieces:
        gate, up = torch.nn.functional.linear(x, expert.linear_fc1.weight, expert.linear_fc1.bias).chunk(2, -1)
        act = torch.nn.functional.silu(gate) * up * p.unsqueeze(1)
        parts.append(act @ expert.linear_fc2.weight.T + p.unsqueeze(1) * expert.linear_fc2.bias)
    return torch.cat(parts), None


def test_biases_are_scaled_by_the_probabilities(one_rank):
    experts = experts_of(integration.MoegemmExperts, one_rank, add_bias_linear=True)
    found = outputs(experts)
    experts.zero_grad()
    expected = outputs(lambda *tensors: plain(experts, *tensors), experts)
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-4, atol=1e-5), name


UNFUSED = {"bias_activation_fusion": False}  # only then are clamp and offset free


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gated_linear_unit": False},
        {"activation_func_clamp_value": 0.05, **UNFUSED},
        {"glu_linear_offset": 1.0, "activation_func_clamp_value": 0.05, **UNFUSED},
    ],
    ids=str,
)
def test_experts_are_megatrons(one_rank, changes):
    expected = outputs(experts_of(integration.SequentialMLP, one_rank, **changes))
    found = outputs(experts_of(integration.MoegemmExperts, one_rank, **changes))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        want = torch.zeros_like(value) if expected[name] is None else expected[name]  # an expert without tokens
        assert value is not None, name
        assert torch.allclose(value, want, rtol=1e-4, atol=1e-5), name


def test_weights_lie_in_one_tensor_and_checkpoints_are_megatrons(one_rank):
    theirs = experts_of(integration.SequentialMLP, one_rank)
    ours = experts_of(integration.MoegemmExperts, one_rank)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    stack = ours._stacks[0]
    assert stack.data_ptr() == ours.local_experts[0].linear_fc1.weight.data_ptr()
    assert torch.equal(stack[3], theirs.local_experts[3].linear_fc1.weight)
    of_theirs, of_ours = theirs.sharded_state_dict("mlp."), ours.sharded_state_dict("mlp.")
    assert of_theirs.keys() == of_ours.keys()
    assert {k: v.key for k, v in of_theirs.items() if hasattr(v, "key")} == {
        k: v.key for k, v in of_ours.items() if hasattr(v, "key")
    }


def test_weights_that_were_moved_are_read_where_they_are(one_rank):
    ours = experts_of(integration.MoegemmExperts, one_rank)
    expected = outputs(ours)
    ours.zero_grad()
    for parameter in ours.parameters():
        parameter.data = parameter.data.clone()
    with pytest.warns(UserWarning, match="were moved apart"):
        found = outputs(ours)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_weight_gradients_wait_for_backward_dw(one_rank):
    ours = experts_of(integration.MoegemmExperts, one_rank)
    expected = outputs(ours)
    ours.zero_grad()
    ours.later = integration.WeightGradients()
    found = outputs(ours)
    assert found["local_experts.0.linear_fc1.weight"] is None
    ours.backward_dw()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


def test_what_is_not_computed_is_refused(one_rank):
    with pytest.raises(ValueError, match="activation_func is"):
        experts_of(integration.MoegemmExperts, one_rank, activation_func=torch.tanh)
