"""transformers' expert parallelism, rank by rank in one process: the compact layer is used by itself."""

import copy
import inspect
from importlib import import_module

import pytest
import torch
from tiny_models import build, experts_of, routing

pytest.importorskip("transformers")
integration = import_module("moegemm.transformers")
expert_parallel = import_module("moegemm.integrations.expert_parallel")

FAMILIES = ["qwen3_moe", "gpt_oss"]


def rank_of(experts: torch.nn.Module, rank: int, ranks: int) -> torch.nn.Module:
    """The experts module as transformers leaves it on one rank: its share of every parameter."""
    mine = copy.deepcopy(experts)
    for name, parameter in experts.named_parameters():
        share = parameter.detach().chunk(ranks)[rank].clone()
        setattr(mine, name, torch.nn.Parameter(share))
    mine.num_experts = mine.gate_up_proj.size(0)
    mine._is_expert_parallel = True
    return mine


def seen_by(rank: int, local: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What transformers' router hook makes of the routing: other ranks' slots have no weight and the id after ours."""
    away = ids // local != rank
    return torch.where(away, local, ids % local), weights.masked_fill(away, 0.0)


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.rows: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.namespace == "moegemm" and made is not None:
            first = made[1] if isinstance(made, tuple) else made
            self.rows[function._schema.name.removeprefix("moegemm::")] = first.size(0)
        return made


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_add_up_to_the_whole_layer(device, family):
    experts = experts_of(build(family, "eager")).to(device)
    total = experts.gate_up_proj.size(0)
    ids, weights = (t.to(device) for t in routing(total))
    x = torch.randn(40, 32, device=device)
    whole = integration.experts_forward(experts, x, ids, weights)
    d_out = torch.randn_like(whole)
    expected = dict(zip(
        ("x", *dict(experts.named_parameters())),
        torch.autograd.grad(
            integration.experts_forward(experts, x.requires_grad_(), ids, weights), [x, *experts.parameters()], d_out
        ),
        strict=True,
    ))  # fmt: skip
    out, d_x, parts = 0, 0, {}
    for rank in range(2):
        mine = rank_of(experts, rank, 2)
        local_ids, local_weights = seen_by(rank, total // 2, ids, weights)
        with Operators() as ran:
            share = integration.experts_forward(mine, x, local_ids, local_weights)
        rows = int((local_ids < total // 2).sum())
        assert ran.rows["route_compact"] == ran.rows["forward"] == rows
        assert ran.rows["combine_rows"] == 40
        gradients = torch.autograd.grad(share, [x, *mine.parameters()], d_out)
        out, d_x = out + share, d_x + gradients[0]
        for name, gradient in zip(dict(mine.named_parameters()), gradients[1:], strict=True):
            parts.setdefault(name, []).append(gradient)
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(d_x, expected["x"], atol=1e-5)
    for name, gradients in parts.items():
        assert torch.allclose(torch.cat(gradients), expected[name], atol=1e-5), name


def test_where_nothing_may_wait_rows_are_a_capacity():
    experts = rank_of(experts_of(build("qwen3_moe", "eager")), 0, 2)
    ids, weights = seen_by(0, 3, *routing(6))
    x = torch.randn(40, 32)
    expected = integration.experts_forward(experts, x, ids, weights)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *tensors: integration.experts_forward(experts, *tensors), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x, ids, weights), expected)
    assert expert_parallel.rows_needed(ids.to("meta"), 3) == 80
    assert expert_parallel.rows_needed(ids.to("meta"), 1) == 40
    assert expert_parallel.rows_needed(ids, 3) == int((ids < 3).sum())


def test_a_rank_without_tokens_gives_every_weight_a_gradient():
    experts = rank_of(experts_of(build("qwen3_moe", "eager")), 0, 2)
    x = torch.randn(5, 32, requires_grad=True)
    out = integration.experts_forward(experts, x, torch.full((5, 2), 3), torch.zeros(5, 2))
    out.sum().backward()
    assert not out.any()
    assert all(p.grad is not None and not p.grad.any() for p in (x, *experts.parameters()))


def test_modules_that_are_not_split_stay_with_the_plain_layer():
    experts = experts_of(build("qwen3_moe", "eager"))
    with Operators() as ran:
        integration.experts_forward(experts, torch.randn(40, 32), *routing(6))
    assert "route" in ran.rows
    assert "route_compact" not in ran.rows


class Mesh:
    """Of one rank."""

    get_group = size = lambda self: 1


def exchanged_by(monkeypatch, experts: torch.nn.Module, **options) -> None:
    """Puts transformers' token dispatch in front of the module's forward."""
    layer = pytest.importorskip("transformers.distributed.expert_parallel")
    install = layer.EpDispatchExpertsParallel().install_forward
    accepted = inspect.signature(install).parameters
    newer = {"tp_mesh": Mesh()} if "tp_mesh" in accepted else {}
    if not options.keys() <= accepted.keys():
        pytest.skip("this transformers has no ep_implementation")
    monkeypatch.setattr(layer, "get_process_group_ranks", lambda group: [0], raising=False)
    install(experts, Mesh(), **newer, **options)


def test_tokens_that_were_exchanged_stay_with_the_plain_layer(monkeypatch):
    """transformers' token dispatch gives every slot an expert of ours: there is nothing to leave out."""
    experts = rank_of(experts_of(build("qwen3_moe", "eager")), 0, 2)
    tokens = torch.randn(5, 32, requires_grad=True)
    assert expert_parallel.ids_of_others_remain(experts, tokens)
    exchanged_by(monkeypatch, experts)
    assert not expert_parallel.ids_of_others_remain(experts, tokens)


@pytest.mark.parametrize(("implementation", "training", "inference"), [
    ("all_to_all", False, False), ("all_reduce", True, True), ("auto", False, True),
])  # fmt: skip
def test_what_a_user_names_decides_whether_ids_of_others_remain(monkeypatch, implementation, training, inference):
    experts = rank_of(experts_of(build("qwen3_moe", "eager")), 0, 2)
    exchanged_by(monkeypatch, experts, ep_implementation=implementation)
    tokens = torch.randn(5, 32, requires_grad=True)
    assert expert_parallel.ids_of_others_remain(experts, tokens) is training
    with torch.no_grad():
        assert expert_parallel.ids_of_others_remain(experts, tokens) is inference
    assert expert_parallel.ids_of_others_remain(experts, tokens.detach()) is inference
    compiled = torch.compile(expert_parallel.ids_of_others_remain, backend="eager", fullgraph=True)
    assert compiled(experts, tokens) is training
