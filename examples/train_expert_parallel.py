"""Trains a small Mixture-of-Experts transformer with its experts spread over processes, beside the same model in one
process, and compares the two: same loss curve, a part of the experts' memory on each rank.

    torchrun --nproc-per-node 2 examples/train_expert_parallel.py            # CPUs with gloo, or GPUs with NCCL
    torchrun --nproc-per-node 4 examples/train_expert_parallel.py --quick    # less than a minute on two cores
"""

import argparse
import contextlib
import os
import sys

import moegemm
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from moegemm.distributed import clip_grad_norm_, expert_parallel_mlp, shard_experts
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from train_moe import (
    BALANCE_WEIGHT,
    Batches,
    Experts,
    MoeLayer,
    Size,
    Transformer,
    comparison_options,
    draw,
    made_up_text,
)

QUICK_STEPS = 40
PARAMETERS = ("gate_up", "down")  # what train_moe.py calls its stacks of experts


class SpreadLayer(nn.Module):
    """The router and the experts of a MoeLayer, whose experts are on all ranks of the mesh; None: they are all here."""

    def __init__(self, layer: MoeLayer, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.size, self.router, self.experts, self.mesh = layer.size, layer.router, layer.experts, mesh
        self.balance = torch.zeros(())
        if mesh is not None:
            shard_experts(self.experts, mesh, PARAMETERS)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, self.size.width)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, ids = probabilities.topk(self.size.topk)
        weights = weights / weights.sum(-1, keepdim=True)
        self.balance = self._balance(probabilities, ids)
        stacks = self.experts.gate_up, self.experts.down
        if self.mesh is None:
            return moegemm.moe_mlp(tokens, *stacks, ids, weights).view(x.shape)
        return expert_parallel_mlp(tokens, *stacks, ids, weights, mesh=self.mesh).view(x.shape)

    def _balance(self, probabilities: Tensor, ids: Tensor) -> Tensor:
        """This rank's share of the load-balancing loss: how full an expert is counts over the tokens of all ranks."""
        fraction = F.one_hot(ids, self.size.experts).float().mean((0, 1))
        ranks = 1 if self.mesh is None else self.mesh.size()
        if self.mesh is not None:
            dist.all_reduce(fraction, group=self.mesh.get_group())
        return self.size.experts * (fraction / ranks * probabilities.mean(0)).sum() / ranks


class Training:
    """One model in training on its rank's part of every batch: the mean loss of the whole batch, step by step."""

    def __init__(self, text: str, size: Size, device: torch.device, seed: int, mesh: DeviceMesh | None) -> None:
        torch.manual_seed(seed)
        batches = Batches(text, size, str(device), seed)
        self.mesh, self.ranks = mesh, 1 if mesh is None else mesh.size()
        self.model = Transformer(batches.vocabulary, size, Experts)
        for block in self.model.blocks:
            block.moe = SpreadLayer(block.moe, mesh)
        self.model.to(device)
        self.batches = iter(batches)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False)
        on_gpu = device.type == "cuda"
        self.precision = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else contextlib.nullcontext()
        self.losses: list[float] = []

    def step(self) -> None:
        ids, targets = next(self.batches)
        if self.mesh is not None:
            rank = self.mesh.get_local_rank()
            ids, targets = ids.chunk(self.ranks)[rank], targets.chunk(self.ranks)[rank]
        with self.precision:
            logits, balance = self.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) / self.ranks
        self.optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE_WEIGHT * balance).backward()
        loss = loss.detach()
        if self.mesh is not None:
            self._sum_over_ranks(loss)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())

    def _sum_over_ranks(self, loss: Tensor) -> None:
        """Of what every rank has whole. Gradients of experts are sums over the tokens of all ranks already."""
        dist.all_reduce(loss, group=self.mesh.get_group())
        for parameter in self.model.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                dist.all_reduce(parameter.grad, group=self.mesh.get_group())

    @property
    def expert_bytes(self) -> int:
        """On this rank."""
        stacks = [p for block in self.model.blocks for p in block.moe.experts.parameters()]
        return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in stacks)


def start_group(wanted: str | None) -> tuple[DeviceMesh, torch.device]:
    """The group that torchrun describes, or one of this process alone."""
    local, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    kind = wanted or ("cuda" if enough_gpus else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(local % torch.cuda.device_count())
    backend = "nccl" if kind == "cuda" and enough_gpus else "gloo"  # NCCL takes one rank per GPU
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("ep",)), device


def train(options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> bool:
    """Both models in turns; whether their curves are the same. Every rank returns the same."""
    ranks, first = mesh.size(), mesh.get_local_rank() == 0
    text, size = made_up_text(200_000, options.seed), Size()
    if size.batch % ranks or size.experts % ranks:
        raise SystemExit(f"{ranks} ranks do not divide {size.experts} experts and a batch of {size.batch}")
    spread = Training(text, size, device, options.seed, mesh)
    alone = Training(text, size, device, options.seed, None) if first else None
    silent = None if first else True
    progress = tqdm(range(options.steps), desc="training", unit="step", mininterval=0.5, disable=silent)
    for _ in progress:
        spread.step()
        if alone is not None:
            alone.step()
            progress.set_postfix_str(f"loss {spread.losses[-1]:.3f}", refresh=False)
    same = torch.ones(1, device=device)
    if alone is not None:
        pairs = list(zip(spread.losses, alone.losses, strict=True))
        difference = sum(abs(a - b) for a, b in pairs) / len(pairs)
        same *= difference <= options.tolerance
        print(
            f"loss {spread.losses[0]:.3f} -> {spread.losses[-1]:.3f} on {ranks} ranks, {alone.losses[-1]:.3f} on one; "
            f"curves differ by {difference:.6f} on average ({'same' if same else 'NOT the same'} within "
            f"{options.tolerance:g}); experts take {spread.expert_bytes / 2**20:.1f} MiB on each rank, "
            f"{alone.expert_bytes / 2**20:.1f} on one"
        )
        curves = {f"{ranks} ranks": spread.losses, "one process": alone.losses}
        print(draw(curves, "Experts on several ranks, and on one", options.plot))
    dist.broadcast(same, 0)
    return bool(same)


def main() -> int:
    options = comparison_options(__doc__, 200, QUICK_STEPS, "train_expert_parallel.png")
    mesh, device = start_group(options.device)
    try:
        return 0 if train(options, mesh, device) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
