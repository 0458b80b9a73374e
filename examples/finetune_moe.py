"""Fine-tunes a small Mixture-of-Experts model with transformers' Trainer, its experts running on moegemm.

    python examples/finetune_moe.py                              # a toy model on the CPU, under a minute
    python examples/finetune_moe.py --freeze-experts             # train attention and router only: no dW is computed
    python examples/finetune_moe.py --model Qwen/Qwen3-30B-A3B --dtype bf16 --steps 50

Without --model a random qwen3_moe of a few hundred thousand parameters learns to count.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

try:
    import moegemm.transformers
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm.transformers  # noqa: F401

VOCABULARY, LENGTH = 64, 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Counting(torch.utils.data.Dataset):
    """Sequences that go up by a fixed step: the next token follows from the last two."""

    def __init__(self, count: int, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(VOCABULARY, (count, 1), generator=generator)
        step = torch.randint(1, 8, (count, 1), generator=generator)
        self.ids = (start + step * torch.arange(length)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def toy_model(dtype: torch.dtype) -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4,
        max_position_embeddings=LENGTH, pad_token_id=0, experts_implementation="moegemm",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hugging Face hub or a folder; default: a toy")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--freeze-experts", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    options = parser.parse_args()
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    return options


def main() -> None:
    options = arguments()
    dtype = DTYPES[options.dtype]
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, experts_implementation="moegemm"
        )
    else:
        model = toy_model(dtype)
    for name, parameter in model.named_parameters():
        if options.freeze_experts and ".experts." in name:
            parameter.requires_grad_(False)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__}: {total:,} parameters, {trained:,} trained, experts on moegemm")

    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                folder,
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                learning_rate=3e-3,
                lr_scheduler_type="cosine",
                logging_steps=max(1, options.steps // 6),
                report_to=[],
                gradient_checkpointing=options.checkpointing,
                save_strategy="no",
                dataloader_num_workers=0,
            ),
            train_dataset=Counting(options.steps * options.batch),
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {trainer.state.global_step} steps")
    if not losses[-1] < losses[0]:
        sys.exit("the loss did not go down")


if __name__ == "__main__":
    main()
