"""Fine-tunes the experts of a Mixture-of-Experts model with LoRA: transformers' Trainer, PEFT's adapters, moegemm.

    python examples/finetune_lora.py                             # a small model on the CPU, about a minute
    python examples/finetune_lora.py --sizes qwen3-30b-a3b --layers 2 --dtype bf16 --batch 8 --length 1024   # on a GPU
    python examples/finetune_lora.py --model Qwen/Qwen3-30B-A3B --dtype bf16 --steps 50

The model is random unless --model names one. It is trained twice from the same start: as it runs by itself, and with
PEFT adding its adapters to whole weights. Losses are drawn as they fall; a table compares step time and memory.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

try:
    import peft
    import transformers
except ImportError as error:
    sys.exit(
        f"this example needs transformers, accelerate and peft: pip install 'moegemm[transformers,lora]' ({error})"
    )
from finetune_moe import DTYPES, VOCABULARY, Counting  # finds moegemm, too
from moegemm.bench.cases import read_catalogue
from moegemm.integrations.peft_adapters import left_to_peft

WAYS = ("moegemm", "PEFT's own path")
HEIGHT = 8  # lines of the loss curve


class StepClock(transformers.TrainerCallback):
    """The time of each step, and the losses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._begin = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._begin = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(self._now() - self._begin)

    def on_log(self, *args: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def random_model(options: argparse.Namespace) -> torch.nn.Module:
    """A qwen3_moe of the asked sizes."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
    if options.sizes:
        model = read_catalogue()[options.sizes]
        sizes = {
            "hidden_size": model.hidden, "moe_intermediate_size": model.intermediate, "num_experts": model.experts,
            "num_experts_per_tok": model.topk,
        }  # fmt: skip
    heads = max(4, sizes["hidden_size"] // 128)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, num_hidden_layers=options.layers, num_attention_heads=heads, num_key_value_heads=2,
        head_dim=sizes["hidden_size"] // heads, intermediate_size=128, max_position_embeddings=options.length,
        pad_token_id=0, experts_implementation="moegemm", **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype])


def adapted_model(options: argparse.Namespace) -> torch.nn.Module:
    """The model with adapters on its experts and on its attention."""
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=DTYPES[options.dtype], experts_implementation="moegemm"
        )
    else:
        model = random_model(options)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=None if options.model else ["lm_head", "embed_tokens"],  # a random model knows nothing
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def train(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Trains a fresh model one way: median step time, memory, losses."""
    model = adapted_model(options)
    clock = StepClock()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    ours = way == WAYS[0]
    with tempfile.TemporaryDirectory() as folder, contextlib.nullcontext() if ours else left_to_peft():
        settings = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch, learning_rate=5e-3,
            lr_scheduler_type="cosine", logging_steps=max(1, options.steps // 40), report_to=[], save_strategy="no",
            gradient_checkpointing=options.checkpointing, dataloader_num_workers=0,
        )  # fmt: skip
        rows = Counting(options.steps * options.batch, options.length)
        transformers.Trainer(model, settings, train_dataset=rows, callbacks=[clock]).train()
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    return {
        "ms": 1e3 * statistics.median(clock.seconds[len(clock.seconds) // 5 :]),
        "losses": clock.losses,
        "peak_mib": peak,
        "kept_mib": kept_mib(model, options, ours),
    }


def kept_mib(model: torch.nn.Module, options: argparse.Namespace, ours: bool) -> float:
    """What one forward keeps for its backward, besides the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = Counting(options.batch, options.length).ids.to(next(model.parameters()).device)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        contextlib.nullcontext() if ours else left_to_peft(),
    ):
        model(input_ids=batch, labels=batch)
    return sum(kept.values()) / 2**20


def curve(losses: list[float]) -> str:
    """The losses as a picture of text, from the first step to the last."""
    low, high = min(losses), max(losses)
    span = max(high - low, 1e-9)
    heights = [round((loss - low) / span * (HEIGHT - 1)) for loss in losses]
    lines = []
    for level in reversed(range(HEIGHT)):
        label = f"{low + span * level / (HEIGHT - 1):6.3f} |"
        lines.append(label + "".join("*" if height == level else " " for height in heights))
    return "\n".join([*lines, "       +" + "-" * len(losses)])


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':18}{'ms per step':>14}{'MiB kept':>12}{'peak MiB':>12}{'last loss':>12}"]
    for way, result in found.items():
        peak = "-" if result["peak_mib"] is None else f"{result['peak_mib']:.0f}"
        values = f"{result['ms']:14.1f}{result['kept_mib']:12.1f}{peak:>12}{result['losses'][-1]:12.3f}"
        lines.append(f"{way:18}{values}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hugging Face hub or a folder; default: a random one")
    parser.add_argument(
        "--sizes", choices=list(read_catalogue()), help="layer sizes of the random model; default: small"
    )
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=80, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--ours-only", action="store_true", help="leave out PEFT's own path")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    found = {}
    for way in WAYS[:1] if options.ours_only else WAYS:
        print(f"\n{way}:", flush=True)
        found[way] = train(options, way)
    losses = found[WAYS[0]]["losses"]
    print(f"\nloss on {WAYS[0]}, {options.steps} steps\n{curve(losses)}\n\n{table(found)}")
    if not losses[-1] < losses[0]:
        sys.exit("the loss did not go down")


if __name__ == "__main__":
    main()
