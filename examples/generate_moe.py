"""Generates with a small Mixture-of-Experts model whose experts run on moegemm, one token at a time.

    python examples/generate_moe.py                       # a toy model on the CPU, compiled with torch.compile
    python examples/generate_moe.py --device cuda         # the decoding step as one CUDA graph
    python examples/generate_moe.py --model Qwen/Qwen3-30B-A3B --dtype bf16 --device cuda

The decoding step has fixed shapes (a static cache, one token per sequence), and moegemm keeps expert sizes and indices
on the device: the same graph serves every step, whatever the router decides.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

try:
    import moegemm.transformers
except ModuleNotFoundError:
    sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
    import moegemm.transformers  # noqa: F401

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def toy_model(dtype: torch.dtype) -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4,
        max_position_embeddings=512, pad_token_id=0, experts_implementation="moegemm",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


class Decoder:
    """The model with a static cache: one step takes a token per sequence and gives the next."""

    def __init__(self, model: torch.nn.Module, batch: int, length: int) -> None:
        self.model = model
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        device = model.device
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def _logits(self, ids: Tensor, position: Tensor) -> Tensor:
        batch = ids.size(0)
        out = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, position_ids=position.expand(batch, -1),
            cache_position=position,
        )  # fmt: skip
        return out.logits[:, -1]

    def prefill(self, prompt: Tensor) -> None:
        position = torch.arange(prompt.size(1), device=prompt.device)
        self.token.copy_(self._logits(prompt, position).argmax(-1, keepdim=True))
        self.position.fill_(prompt.size(1))

    def step(self) -> None:
        """In place, so that a CUDA graph of it can be replayed."""
        self.token.copy_(self._logits(self.token, self.position).argmax(-1, keepdim=True))
        self.position.add_(1)


def captured(decoder: Decoder, prompt: Tensor) -> Callable[[], object]:
    """The decoding step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decoder.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step()
    # The warm-up has moved the cache on by a token. Its memory, which the graph knows, is emptied and filled again.
    decoder.cache.reset()
    decoder.prefill(prompt)
    return graph.replay


def generate(
    decoder: Decoder, step: Callable[[], object], prompt: Tensor, count: int, label: str
) -> tuple[Tensor, float]:
    """The new tokens, and the seconds of the steps after the first."""
    tokens = [decoder.token.clone()]
    begin = time.perf_counter()
    for i in tqdm(range(count - 1), desc=label, unit="token"):
        step()
        tokens.append(decoder.token.clone())
        if i == 0:  # compiling, if any, has happened now
            if prompt.is_cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
    if prompt.is_cuda:
        torch.cuda.synchronize()
    return torch.cat(tokens, dim=1), time.perf_counter() - begin


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the Hugging Face hub or a folder; default: a toy")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    parser.add_argument("--dtype", default=None, choices=list(DTYPES), help="default: fp32 on the CPU, else bf16")
    parser.add_argument("--batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="neither torch.compile nor a CUDA graph")
    options = parser.parse_args()
    if options.batch < 1:
        parser.error(f"--batch is {options.batch}; it must be at least 1")
    if options.tokens < 3:  # a rate needs a step after the first
        parser.error(f"--tokens is {options.tokens}; it must be at least 3")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch sees no CUDA device")
    return options


@torch.no_grad()
def main() -> None:
    options = arguments()
    dtype = DTYPES[options.dtype or ("fp32" if options.device == "cpu" else "bf16")]
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, experts_implementation="moegemm"
        )
    else:
        model = toy_model(dtype)
    model = model.to(options.device).eval()
    prompt = torch.randint(3, model.config.vocab_size, (options.batch, 16), device=options.device)

    results = {}
    for name in ["eager"] if options.eager else ["eager", "graph" if options.device == "cuda" else "compiled"]:
        decoder = Decoder(model, options.batch, prompt.size(1) + options.tokens + 1)
        decoder.prefill(prompt)
        step: Callable[[], object] = decoder.step
        if name == "graph":
            step = captured(decoder, prompt)
        elif name == "compiled":
            step = torch.compile(decoder.step)
        results[name] = generate(decoder, step, prompt, options.tokens, name)
        seconds = results[name][1]
        print(f"{name}: {options.batch * (options.tokens - 2) / seconds:,.0f} tokens per second")
    first, *rest = (tokens for tokens, _ in results.values())
    for other in rest:
        same = (first == other).float().mean().item()
        print(f"{same:.0%} of the tokens are those of eager")
        if same < 0.9:
            sys.exit("the tokens differ")


if __name__ == "__main__":
    main()
