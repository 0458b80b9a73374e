"""transformers' own expert parallelism, FSDP and Trainer with experts_implementation="moegemm", in real processes."""

from importlib import import_module
from pathlib import Path

import moegemm
import pytest
import torch
import torch.distributed as dist
from tiny_models import assert_same, build, outputs_and_gradients, token_ids
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers")
import_module("moegemm.transformers")
if not hasattr(getattr(transformers, "DistributedConfig", None), "efsdp_size"):
    pytest.skip(f"transformers {transformers.__version__} has no ep_size in DistributedConfig", allow_module_level=True)

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
# Token dispatch is what 5.22's models ask for; masking and a sum over the ranks is the older way. From 5.23 on both are
# names, and the ranks of an expert group that share a batch are a tensor-parallel group with a plan.
NAMED = hasattr(transformers.DistributedConfig, "ep_implementation")
SUMMED = {"model.layers.*.mlp.experts": "moe_tp_experts"}
ROUTERS = {"qwen3_moe": "gate", "gpt_oss": "router", "deepseek_v3": "gate"}
IMPLEMENTATIONS = {"dispatch": "all_to_all", "summed": "all_reduce"}


def configuration(family: str, way: str):
    if NAMED and way in IMPLEMENTATIONS:
        return transformers.DistributedConfig(tp_size=2, ep_size=2, ep_implementation=IMPLEMENTATIONS[way])
    if way == "dispatch":
        return transformers.DistributedConfig(tp_size=2, tp_plan={}, ep_size=2)
    if way == "summed":
        plan = {**SUMMED, f"model.layers.*.mlp.{ROUTERS[family]}": "ep_router"}
        return transformers.DistributedConfig(tp_size=2, tp_plan={}, ep_size=2, ep_plan=plan)
    return transformers.DistributedConfig(fsdp_size=2, ep_size=2)


def load(family: str, way: str, folder: str, implementation: str = "moegemm"):
    import moegemm.transformers  # noqa: F401 - registers the name

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation=implementation,
        distributed_config=configuration(family, way),
    )  # fmt: skip


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread(family: str, way: str, folder: str, implementation: str = "moegemm") -> tuple[int, dict]:
    """How many layers run on moegemm, and outputs and gradients: of a half of the batch where ranks have their own."""
    model = load(family, way, folder, implementation)
    ids = token_ids()
    if way == "fsdp":
        ids = ids.chunk(2)[dist.get_rank()]
    found = {name: whole(value).detach().clone() for name, value in outputs_and_gradients(model, ids).items()}
    return sum(layer.on_moegemm for layer in moegemm.report(model).layers), found


@pytest.mark.parametrize("way", ["dispatch", "summed", "fsdp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_on_ranks_of_transformers_give_logits_and_gradients_of_one(ranks, tmp_path, family, way):
    model = build(family, "eager")
    model.save_pretrained(tmp_path)
    expected = outputs_and_gradients(model, token_ids())
    layers = len(moegemm.report(model).layers)
    # With ranks of their own batches transformers halves the experts' gradients, whatever computes them.
    same_way = ranks(2).run(spread, family, way, str(tmp_path), "eager") if way == "fsdp" else [(0, expected)] * 2
    for rank, (ours, found) in enumerate(ranks(2).run(spread, family, way, str(tmp_path))):
        assert ours == layers > 0
        logits = expected["logits"].chunk(2)[rank] if way == "fsdp" else expected["logits"]
        assert_same(found, {**same_way[rank][1], "logits": logits}, 5e-5)


def train(folder: str, out: str) -> list[float]:
    """Losses of Trainer on a model whose experts are on two ranks."""
    model = load("qwen3_moe", "fsdp", folder)
    rows = token_ids(16, 8)
    arguments = transformers.TrainingArguments(
        out, max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", learning_rate=1e-2, disable_tqdm=True, seed=1, lr_scheduler_type="constant",
    )  # fmt: skip
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_lowers_the_loss_with_experts_on_two_ranks(ranks, tmp_path):
    pytest.importorskip("accelerate")
    build("qwen3_moe", "eager").save_pretrained(tmp_path / "model")
    for losses in ranks(2).run(train, str(tmp_path / "model"), str(Path(tmp_path) / "out"), seconds=200):
        assert len(losses) == 3
        assert losses[-1] < losses[0]
