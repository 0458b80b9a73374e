"""Quantised experts that are spread over ranks give the bits of one process with all tokens."""

import copy

import moegemm
import pytest
import torch
import torch.distributed as dist
from moegemm.distributed import AllToAll, expert_parallel_mlp, shard_experts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXPERTS, HIDDEN, INNER, TOPK, TOKENS = 8, 64, 32, 2, 9


def wrong_names(word: str, adapted: bool) -> list[str]:
    """Which of this rank's results have other bits than one process gives."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = (torch.randn(EXPERTS, n, k) * 0.1 for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
    x = torch.randn(size * TOKENS, HIDDEN).bfloat16()
    router, ids = torch.randn(size * TOKENS, EXPERTS).softmax(-1).topk(TOPK)
    factors = torch.randn(EXPERTS, 8, HIDDEN) * 0.1, torch.randn(EXPERTS, 2 * INNER, 8) * 0.1
    d_out = torch.randn(size * TOKENS, HIDDEN).bfloat16()

    def run(tokens, experts, call):
        leaves = {"x": x[tokens].clone().requires_grad_(), "router": router[tokens].clone().requires_grad_()}
        low = [factor[experts].clone().requires_grad_() for factor in factors]
        weights = [moegemm.quantize(w[experts], word) for w in (first, second)]
        more = {"gate_up": moegemm.LowRank(*low, 0.5)} if adapted else {}
        out = call(leaves["x"], *weights, ids[tokens], leaves["router"], **more)
        out.backward(d_out[tokens])
        found = {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
        return found, [factor.grad for factor in low] if adapted else []

    everything = slice(None)
    whole, whole_low = run(everything, everything, moegemm.lora_moe_mlp if adapted else moegemm.moe_mlp)
    mine, own = slice(rank * TOKENS, (rank + 1) * TOKENS), EXPERTS // size
    dispatcher, experts = AllToAll(None, EXPERTS), slice(rank * own, (rank + 1) * own)
    part, part_low = run(
        mine, experts, lambda *given, **more: expert_parallel_mlp(*given, dispatcher=dispatcher, **more)
    )
    wrong = [name for name, value in part.items() if not torch.equal(value, whole[name][mine])]
    return wrong + [f"factor {i}" for i, g in enumerate(part_low) if not torch.equal(g, whole_low[i][experts])]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("word", ["mxfp4", "int4"])
def test_ranks_have_the_bits_of_one_process(ranks, word, adapted):
    assert ranks(2).run(wrong_names, word, adapted) == [[], []]


class Experts(torch.nn.Module):
    def __init__(self, word: str, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = (torch.randn(EXPERTS, n, k) * 0.1 for n, k in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
        self.gate_up_proj = moegemm.quantize(first, word, **options)
        self.down_proj = moegemm.quantize(second, word, **options)
        self.adapter = moegemm.LoraAdapter(EXPERTS, HIDDEN, 2 * INNER, rank=4)
        torch.nn.init.normal_(self.adapter.B, std=0.1)

    def forward(self, x, ids, router):
        return moegemm.lora_moe_mlp(x, self.gate_up_proj, self.down_proj, ids, router, self.adapter)


def sharded(word: str, options: dict) -> list[bool]:
    """Whether experts that shard_experts spread have the bits of one process, forward and backward, and its state."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, spread = Experts(word, **options), Experts(word, **options)
    shard_experts(spread, init_device_mesh("cpu", (size,)))
    names = ("gate_up_proj.values", "gate_up_proj.scales", "down_proj.values", "down_proj.scales")
    state = spread.state_dict()
    parts = {name: whole.state_dict()[name].chunk(size)[rank] for name in names}  # gloo gathers no fp8
    same = [torch.equal(bytes_of(state[name].to_local()), bytes_of(part)) for name, part in parts.items()]
    x, ids = torch.randn(size * TOKENS, HIDDEN).bfloat16(), torch.randint(EXPERTS, (size * TOKENS, TOPK))
    router, mine = torch.rand(size * TOKENS, TOPK), slice(rank * TOKENS, (rank + 1) * TOKENS)
    expected = whole(x, ids, router)
    out = expert_parallel_mlp(
        x[mine], spread.gate_up_proj, spread.down_proj, ids[mine], router[mine], gate_up=spread.adapter
    )
    expected.sum().backward()
    out.sum().backward()
    same.append(torch.equal(out, expected[mine]))
    same.append(torch.equal(spread.adapter.A.grad.full_tensor(), whole.adapter.A.grad))
    with torch.no_grad():
        copied = copy.deepcopy(spread)
        again = expert_parallel_mlp(x[mine], copied.gate_up_proj, copied.down_proj, ids[mine], router[mine])
        plain = moegemm.moe_mlp(x, whole.gate_up_proj, whole.down_proj, ids, router)
    return [*same, torch.equal(again, plain[mine]), spread.gate_up_proj.shape == whole.gate_up_proj.shape]


def replicated(word: str, wrap: str) -> list[bool]:
    """Whether a model that torch wraps has the bits of its own, and averages the gradients of adapters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ids, router = torch.randint(EXPERTS, (size, TOKENS, TOPK)), torch.rand(size, TOKENS, TOPK)
    x = torch.randn(size, TOKENS, HIDDEN).bfloat16()
    own = Experts(word)
    mine = own(x[rank], ids[rank], router[rank])
    (sum(own(*parts).sum() for parts in zip(x, ids, router, strict=True)) / size).backward()
    wrapped = Experts(word)
    if wrap == "FSDP":
        fully_shard(wrapped, mesh=init_device_mesh("cpu", (size,)))
        model = wrapped
    else:
        model = torch.nn.parallel.DistributedDataParallel(wrapped, init_sync="fp8" not in word)  # gloo has no fp8
    out = model(x[rank], ids[rank], router[rank])
    out.sum().backward()
    gradient = wrapped.adapter.A.grad
    whole = gradient.full_tensor() if wrap == "FSDP" else gradient
    return [torch.equal(out, mine), torch.allclose(whole, own.adapter.A.grad, rtol=1e-2, atol=1e-2)]


@pytest.mark.parametrize("wrap", ["DDP", "FSDP"])
@pytest.mark.parametrize("word", ["mxfp4", "fp8", "int4", "nf4"])
def test_torch_wraps_models_with_quantised_experts(ranks, word, wrap):
    assert ranks(2).run(replicated, word, wrap) == [[True] * 2] * 2


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize(
    ("word", "options"), [("mxfp4", {}), ("fp8", {}), ("fp8", {"block": "tensor"}), ("int4", {}), ("nf4", {})]
)
def test_experts_that_are_sharded_have_the_bits_of_one_process(ranks, word, options):
    assert ranks(2).run(sharded, word, options) == [[True] * 8] * 2
