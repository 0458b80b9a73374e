"""Llama 4's experts wrapped alone by FSDP2, and sharded by transformers' tensor parallelism, on processes with gloo."""

import os
from importlib import import_module
from pathlib import Path

import moegemm
import pytest
import torch
import torch.distributed as dist
from tiny_models import assert_same, build, outputs_and_gradients, token_ids

transformers = pytest.importorskip("transformers")
import_module("moegemm.transformers")
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch has no gloo")

PROCESSES = 2
ORDERS = ("patch first", "wrap first", "by name")


def start(rank: int, work, folder: Path) -> None:
    """One process: `work` saves what it finds in a file of its own."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES))
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    try:
        torch.save(work(folder), folder / f"found{rank}")
    finally:
        dist.destroy_process_group()


def run(work, folder: Path) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # processes on the CPU, also where there is one GPU for all of them
        torch.multiprocessing.spawn(start, (work, folder), nprocs=PROCESSES)
    return [torch.load(folder / f"found{rank}") for rank in range(PROCESSES)]


def forwards_of_ours(model: torch.nn.Module) -> int:
    return sum(layer.on_moegemm for layer in moegemm.report(model).layers)


def whole(value: torch.Tensor) -> torch.Tensor:
    """The global tensor. torch 2.11 cannot put together what is split into pieces that take turns (gate and up)."""
    if not hasattr(value, "full_tensor"):
        return value
    turns = getattr(value.placements[0], "split_factor", 1)
    if turns == 1:
        return value.full_tensor()
    local, dim = value.to_local().contiguous(), value.placements[0].dim
    parts = [torch.empty_like(local) for _ in range(PROCESSES)]
    dist.all_gather(parts, local)
    pieces = [part.chunk(turns, dim) for part in parts]
    return torch.cat([piece[turn] for turn in range(turns) for piece in pieces], dim)


def full(found: dict) -> dict:
    return {name: whole(value) for name, value in found.items()}


def sharded(order: str) -> dict:
    from torch.distributed.fsdp import fully_shard

    model = build("llama4", "moegemm" if order == "by name" else "eager")
    if order == "patch first":
        moegemm.patch(model)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer.feed_forward.experts, mesh=mesh)
    if order == "wrap first":
        moegemm.patch(model)
    assert forwards_of_ours(model) == 2
    return full(outputs_and_gradients(model, token_ids()))


def with_fsdp(folder: Path) -> dict:
    return {order: sharded(order) for order in ORDERS}


@pytest.fixture(scope="module")
def found_with_fsdp(tmp_path_factory) -> list[dict]:
    return run(with_fsdp, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("order", ORDERS)
def test_experts_wrapped_alone_by_fsdp_train(found_with_fsdp, order):
    expected = outputs_and_gradients(build("llama4", "eager"), token_ids())
    for found in found_with_fsdp:
        assert_same(found[order], expected, 2e-5)


def with_tensor_parallelism(folder: Path) -> dict:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager", experts_implementation="moegemm", tp_plan="auto"
    )
    ours = forwards_of_ours(model)
    with torch.no_grad():
        logits = model(input_ids=token_ids()).logits
    out = model(input_ids=token_ids(), labels=token_ids(), use_cache=False)
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and "feed_forward" in name}
    return {"logits": full({"": logits})[""], "ours": torch.tensor(ours), **full(gradients)}


def test_tensor_parallelism_of_transformers_infers_and_trains(tmp_path):
    model = build("llama4", "eager")
    if "layers.*.feed_forward.experts" not in model.config.base_model_tp_plan:
        pytest.skip(f"transformers {transformers.__version__} does not sum what its ranks make of Llama 4's experts")
    model.save_pretrained(tmp_path / "model")
    expected = outputs_and_gradients(model, token_ids())
    for found in run(with_tensor_parallelism, tmp_path):
        assert found.pop("ours") == 2
        gradients = {name: expected[name] for name in found}
        assert sum("experts" in name for name in gradients) == 4
        assert_same(found, gradients, 2e-5)
