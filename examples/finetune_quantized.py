"""Trains LoRA adapters beside experts in MXFP4, which stay packed: a gpt-oss of any size on one device.

    python examples/finetune_quantized.py                            # a tiny model, on the CPU in a minute
    python examples/finetune_quantized.py --sizes gpt-oss-20b        # 24 layers on a GPU with 18 GB
    python examples/finetune_quantized.py --sizes gpt-oss-120b       # 36 layers on one H200
    python examples/finetune_quantized.py --model openai/gpt-oss-20b # a checkpoint, packed as it is

Random weights are made on the device, in packed form. Each layer is recomputed in the backward (gradient
checkpointing), and the loss is computed for some tokens at a time: a vocabulary of 200 thousand makes logits large.
"""

import argparse
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    import peft
    import transformers
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"this example needs transformers, peft and tqdm: pip install 'moegemm[transformers,lora]' tqdm ({error})")
try:
    import moegemm.transformers
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm.transformers
from moegemm.integrations.expert_modules.packed_experts import expect_mxfp4, is_packed

SIZES = {
    "tiny": {
        "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 128,
        "intermediate_size": 128, "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
    "gpt-oss-20b": {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"num_hidden_layers": 36, "num_local_experts": 128},
}  # fmt: skip
TOKENS_OF_LOGITS = 256  # 256 x 201088 in fp32 are 206 MB
COUNTING = 64  # tokens that the sequences count through


def random_model(sizes: dict[str, Any], device: torch.device) -> Any:
    """A gpt-oss in bf16 whose experts are random bytes."""
    config = transformers.GptOssConfig(**sizes, pad_token_id=0, experts_implementation="moegemm")
    config._attn_implementation = "eager"  # the attention sinks of gpt-oss
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for module in model.modules():
            if type(module).__name__ == "GptOssExperts":
                expect_mxfp4(module)
    model = model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.uint8:
            scales = name.endswith("_scales")  # of values up to 6: a deviation of 0.02
            parameter.random_(118, 121) if scales else parameter.random_(0, 256)
        elif "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02)
    return model.requires_grad_(False)


def adapted(model: Any, rank: int, device: torch.device) -> Any:
    """With adapters in bf16 on the experts and the attention."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    with device:  # where the adapters are made
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss of the next token, with the logits of few tokens at a time."""
    causal = model.get_base_model()
    hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()

    def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = causal.lm_head(rows).float()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")

    parts = zip(hidden.split(TOKENS_OF_LOGITS), labels.split(TOKENS_OF_LOGITS), strict=True)
    total = [torch.utils.checkpoint.checkpoint(part, *both, use_reentrant=False) for both in parts]
    return torch.stack(total).sum() / labels.numel()


def batch(count: int, length: int, seed: int, device: torch.device) -> torch.Tensor:
    """Sequences that go up by a fixed step."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(COUNTING, (count, 1), generator=generator)
    step = torch.randint(1, 8, (count, 1), generator=generator)
    return ((start + step * torch.arange(length)) % COUNTING).to(device)


def peak_memory(device: torch.device) -> float:
    """In GB, of the device's allocator or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def train(model: Any, options: argparse.Namespace, device: torch.device) -> tuple[list[float], list[float]]:
    """Losses and times of the steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.rate, fused=True)
    losses, seconds = [], []
    bar = tqdm(range(options.steps), desc="training", unit="step", disable=None)
    for step in bar:
        ids = batch(options.tokens // options.length, options.length, step, device)
        begin = time.perf_counter()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
        bar.set_postfix(loss=f"{losses[-1]:.3f}", peak=f"{peak_memory(device):.1f} GB")
    return losses, seconds


@dataclass
class Run:
    """What came of it. GB are 1e9 bytes."""

    experts_gb: float  # packed
    trained: int  # parameters
    losses: list[float]
    seconds: list[float]
    peak_gb: float

    @property
    def step_ms(self) -> float:
        """The median without the first step, which loads kernels and fills the allocator."""
        return 1e3 * statistics.median(self.seconds[1:] or self.seconds)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a gpt-oss checkpoint of the hub or a folder; default: random weights")
    parser.add_argument("--sizes", choices=list(SIZES), default="tiny", help="of the random model")
    parser.add_argument("--tokens", type=int, help="of a step; default 4096, tiny 512")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default 256, tiny 32")
    parser.add_argument("--rank", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default 6, tiny 40")
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate")
    options = parser.parse_args(given)
    tiny = options.sizes == "tiny" and not options.model
    for name, small, large in (("tokens", 512, 4096), ("length", 32, 256), ("steps", 40, 6)):
        if getattr(options, name) is None:
            setattr(options, name, small if tiny else large)
    for name, least in (("length", 2), ("tokens", options.length), ("steps", 1), ("rank", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    return options


def run(options: argparse.Namespace) -> Run:
    """Makes or loads the model and trains its adapters."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.perf_counter()
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, experts_implementation="moegemm", dtype=torch.bfloat16, device_map={"": device}
        )
    else:
        model = random_model(SIZES[options.sizes], device)
    experts = sum(p.nbytes for m in model.modules() if is_packed(m) for p in m.parameters(recurse=False))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = adapted(model, options.rank, device).train()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"experts {experts / 1e9:.2f} GB packed, {trained / 1e6:.1f} million parameters are trained")
    print(f"made in {time.perf_counter() - begin:.1f} s; {moegemm.report(model).layers[0].name} runs on moegemm")
    losses, seconds = train(model, options, device)
    return Run(experts / 1e9, trained, losses, seconds, peak_memory(device))


def main() -> None:
    options = arguments()
    done = run(options)
    print(
        f"{options.tokens} tokens a step: {done.step_ms:.0f} ms (first {1e3 * done.seconds[0]:.0f}), "
        f"peak memory {done.peak_gb:.2f} GB, loss {done.losses[0]:.3f} -> {done.losses[-1]:.3f}"
    )
    if not done.losses[-1] < done.losses[0]:
        sys.exit("the loss did not go down")


if __name__ == "__main__":
    main()
