"""Selective activation checkpointing with checkpoint_ops(): no product of the forward runs a second time."""

from functools import partial

import moegemm
import pytest
import torch
from counted import Counted
from moegemm.distributed import checkpoint_ops
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

E, H, INNER, TOPK = 4, 64, 64, 2


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype).requires_grad_()


def rows_and_sizes(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(12, H, dtype=dtype), torch.tensor([5, 0, 4, 3])


def product(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return moegemm.grouped_gemm(x, drawn(E, H, H), sizes, 1)


def permuted_product(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    indices = torch.arange(len(x)).flip(0)
    return moegemm.grouped_gemm(x, drawn(E, H, H), sizes, 1, indices, permute_x=True)


def quantised_product(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return moegemm.grouped_gemm(x, moegemm.quantize(drawn(E, H, H), "mxfp4"), sizes, 1)


def layer(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return moegemm.experts_mlp(x, drawn(E, 2 * INNER, H), drawn(E, H, INNER), sizes)


def layer_of_pairs(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return moegemm.experts_mlp(x, (drawn(E, INNER, H), drawn(E, INNER, H)), drawn(E, H, INNER), sizes)


def quantised_layer(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    first, second = (moegemm.quantize(drawn(*shape), "mxfp4") for shape in ((E, 2 * INNER, H), (E, H, INNER)))
    return moegemm.experts_mlp(x, first, second, sizes)


def adapted_layer(x: torch.Tensor, sizes: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
    ids = torch.arange(len(x) * TOPK).view(-1, TOPK) % E
    first = moegemm.LowRank(drawn(E, 8, H), drawn(E, 2 * INNER, 8), 2.0, dropout)
    second = moegemm.LowRank(drawn(E, 8, INNER), drawn(E, H, 8), 2.0, dropout)
    return moegemm.lora_moe_mlp(x, drawn(E, 2 * INNER, H), drawn(E, H, INNER), ids, None, first, second)


LAYERS = {
    "plain": (product, ["forward_plain"]),
    "permuted": (permuted_product, ["forward"]),
    "quantised": (quantised_product, ["forward"]),
    "layer": (layer, ["forward"] * 2),
    "layer of pairs": (layer_of_pairs, ["forward_pair", "forward"]),
    "quantised layer": (quantised_layer, ["forward"] * 2),
    "adapters": (adapted_layer, ["forward", "forward_low_rank"] * 2),
    "adapters that drop": (partial(adapted_layer, dropout=0.5), ["forward", "forward_low_rank"] * 2),
}


def forward_products(counted: Counted) -> dict[str, int]:
    return {name: count for name, count in counted.counts.items() if name.startswith("forward")}


@pytest.mark.parametrize("keep", ["products", "routing"])
@pytest.mark.parametrize("name", LAYERS)
def test_products_that_are_kept_run_once(name, keep):
    run, products = LAYERS[name]
    x, sizes = rows_and_sizes(torch.bfloat16 if "quantised" in name else torch.float32)
    kept = checkpoint_ops(keep)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    expected = {one: products.count(one) for one in products}
    with Counted() as forward:
        out = checkpoint(
            run, x, sizes, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    assert forward_products(forward) == expected
    with Counted() as backward:
        out.square().sum().backward()
    assert forward_products(backward) == ({} if keep == "products" else expected)
