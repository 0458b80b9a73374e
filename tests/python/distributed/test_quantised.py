"""Quantised experts that are spread over ranks give the bits of one process with all tokens."""

import moegemm
import pytest
import torch
import torch.distributed as dist
from moegemm.distributed import AllToAll, expert_parallel_mlp

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
