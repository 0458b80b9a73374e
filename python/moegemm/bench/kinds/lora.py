"""LoRA on the experts of one layer, through PEFT: beside the frozen layer, and beside PEFT's own path."""

import contextlib
import contextvars
import gc
import statistics
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moegemm.bench.cases import DECODE_TOKENS, Model
from moegemm.bench.timing import Clock, captured, spread
from moegemm.integrations.expert_modules.experts import experts_forward
from moegemm.integrations.peft_adapters import follow_peft, left_to_peft
from moegemm.lora.kept import keep_factors

RANKS = (16, 64)
MODELS = ("qwen3-30b-a3b", "gpt-oss-120b", "mixtral-8x7b", "deepseek-v3", "qwen3-next-80b-a3b")
TOKENS = (8192, 4096, 1, 16, 64)
CPU_TOKENS = (256,)
MIB = 1 << 20
FROZEN = "frozen"

_cuda: Any = torch.cuda


class SizedExperts(nn.Module):
    """Frozen experts as transformers' interface has them: SwiGLU, no biases, a model's sizes."""

    has_gate, has_bias, has_post_expert_norm, _is_expert_parallel = True, False, False, False
    is_transposed, is_concatenated = False, True

    def __init__(self, model: Model, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.num_experts = model.experts
        self.config = types.SimpleNamespace(_experts_implementation="moegemm")
        self.act_fn = nn.functional.silu

        def weights(rows: int, columns: int) -> nn.Parameter:
            w = torch.empty((model.experts, rows, columns), dtype=dtype, device=device).normal_(std=columns**-0.5)
            return nn.Parameter(w, requires_grad=False)

        self.gate_up_proj = weights(2 * model.intermediate, model.hidden)
        self.down_proj = weights(model.hidden, model.intermediate)

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def forward(self, x: Tensor, ids: Tensor, router_weights: Tensor) -> Tensor:
        return experts_forward(self, x, ids, router_weights)


class Adapted(nn.Module):
    """The same experts with PEFT's adapters around them, in fp32 as PEFT keeps those of a 16-bit model."""

    def __init__(self, experts: SizedExperts, rank: int) -> None:
        super().__init__()
        import peft

        follow_peft()  # as `moegemm.patch` and `moegemm.transformers` do

        self.experts: nn.Module = experts
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=targets, target_modules=[])
        peft.inject_adapter_in_model(config, self)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.float()
                    parameter.requires_grad_()
                if "lora_B" in name:
                    parameter.normal_(std=0.02)


class Layer:
    """One layer's inputs, and its contenders by name."""

    def __init__(self, model: Model, tokens: int, dtype: torch.dtype, device: str, experts: SizedExperts) -> None:
        self.model, self.tokens = model, tokens
        self.x = torch.randn(tokens, model.hidden, device=device).to(dtype).requires_grad_()
        scores, self.ids = torch.randn(tokens, model.experts, device=device).softmax(-1).topk(model.topk)
        self.router_weights = (scores / scores.sum(-1, keepdim=True)).to(dtype)
        self.d_out = torch.randn_like(self.x)
        self.modules: dict[str, nn.Module] = {FROZEN: experts}
        for rank in RANKS:
            self.modules[f"ours {rank}"] = self.modules[f"peft {rank}"] = Adapted(experts, rank)
            if tokens <= DECODE_TOKENS:
                self.modules[f"kept {rank}"] = self.modules[f"ours {rank}"]
        self._keeping, self._kept = contextvars.copy_context(), contextlib.ExitStack()
        if tokens <= DECODE_TOKENS:
            self._keeping.run(lambda: self._kept.enter_context(keep_factors()))

    def close(self) -> None:
        """Drops the factors that "kept" calls read."""
        self._keeping.run(self._kept.close)

    def call(self, name: str) -> Tensor:
        module = self.modules[name]
        run = module if name == FROZEN else module.experts
        with left_to_peft() if name.startswith("peft") else contextlib.nullcontext():
            out: Tensor = run(self.x, self.ids, self.router_weights)  # type: ignore[operator]
        return out

    def clear_gradients(self) -> None:
        self.x.grad = None
        for module in self.modules.values():
            module.zero_grad()

    def forward(self, name: str) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                self.call(name)

        return (lambda: self._keeping.run(run)) if name.startswith("kept") else run

    def forward_backward(self, name: str) -> Callable[[], object]:
        def run() -> None:
            self.clear_gradients()
            torch.autograd.backward(self.call(name), self.d_out)

        return run

    def flops(self) -> float:
        m = self.model
        return 6.0 * self.tokens * m.topk * m.hidden * m.intermediate * (1 if self.tokens <= DECODE_TOKENS else 2)


def _kept_mib(layer: Layer, name: str, device: str) -> float:
    """Memory that a forward leaves allocated for its backward, its output included."""
    layer.clear_gradients()
    if device == "cuda":
        torch.cuda.synchronize()
        before = _cuda.memory_allocated()
        out = layer.call(name)
        torch.cuda.synchronize()
        return float(_cuda.memory_allocated() - before) / MIB
    arguments = {t.untyped_storage().data_ptr() for t in (layer.x, *layer.modules[name].parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in arguments:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer.call(name)
    return (sum(kept.values()) + out.numel() * out.element_size()) / MIB


@contextlib.contextmanager
def _without_memory_errors(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        print(f"{what}: does not fit into memory", file=sys.stderr)
        gc.collect()
        torch.cuda.empty_cache()


def _runnable(layer: Layer, decode: bool) -> dict[str, Callable[[], object]]:
    """The contenders that fit into memory."""
    calls = {}
    for name in layer.modules:
        call = layer.forward(name) if decode else layer.forward_backward(name)
        with _without_memory_errors(f"{layer.model.name}, {layer.tokens} tokens, {name}"):
            call()
            calls[name] = call
    return calls


def _difference(layer: Layer, rank: int) -> float:
    """||ours - PEFT's|| / ||PEFT's||."""
    with torch.no_grad():
        ours, theirs = layer.call(f"ours {rank}").float(), layer.call(f"peft {rank}").float()
    return float(((ours - theirs).norm() / theirs.norm()).item())


def measure_case(layer: Layer, clock: Clock, device: str, rounds: int) -> dict[str, Any]:
    decode = layer.tokens <= DECODE_TOKENS
    calls = _runnable(layer, decode)
    times = clock.round_robin(calls, rounds, layer.flops())
    found: dict[str, Any] = {}
    for name in calls:
        found[name] = spread(times[name])
        if not decode:
            found[name]["kept_mib"] = _kept_mib(layer, name, device)
    if decode and device == "cuda":
        graphs = {name: captured(call) for name, call in calls.items() if not name.startswith("peft")}
        for name, replays in clock.round_robin(graphs, rounds, layer.flops()).items():
            found[name]["graph_ms"] = statistics.median(replays)
    entry = {"model": layer.model.name, "tokens": layer.tokens, "what": "forward" if decode else "forward + backward"}
    ranks = [rank for rank in RANKS if f"peft {rank}" in calls]
    return entry | {"contenders": found, "difference": {str(rank): _difference(layer, rank) for rank in ranks}}


def measure(
    models: Sequence[Model], tokens: Sequence[int], device: str, dtype: torch.dtype, rounds: int, clock: Clock,
    done: set[tuple[str, int]], keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """One entry for each model and number of tokens."""
    for model in models:
        missing = [count for count in dict.fromkeys(tokens) if (model.name, count) not in done]
        if not missing:
            continue
        torch.manual_seed(0)
        experts = SizedExperts(model, dtype, device)
        for count in missing:
            with _without_memory_errors(f"{model.name}, {count} tokens"):
                layer = Layer(model, count, dtype, device, experts)
                with contextlib.closing(layer):
                    keep(measure_case(layer, clock, device, rounds))
        del experts
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def words_of(entry: dict[str, Any]) -> str:
    """What a case has come to, in a line."""
    found = entry["contenders"]
    frozen = found[FROZEN]["ms"]
    ratios = [f"rank {rank} {found[f'ours {rank}']['ms'] / frozen:.2f}" for rank in RANKS if f"ours {rank}" in found]
    return f"{entry['model']} T={entry['tokens']}: frozen {frozen:.3f} ms, {', '.join(ratios)}"


def _cell(found: dict[str, Any], name: str) -> str:
    if name not in found:
        return "does not fit"
    value, frozen = found[name], found[FROZEN]
    digits = 3 if "graph_ms" in value else 2
    text = f"{value['ms']:.{digits}f} ({value['ms'] / frozen['ms']:.2f}x)"
    if "graph_ms" in value:
        text += f" / {value['graph_ms']:.3f} ({value['graph_ms'] / frozen['graph_ms']:.2f}x)"
    if "kept_mib" in value:
        text += f" / {value['kept_mib']:.0f} ({value['kept_mib'] / frozen['kept_mib']:.2f}x)"
    return text


WAYS = {"ours": "moegemm", "kept": "moegemm, kept factors", "peft": "PEFT's own path"}


def _table(cases: Sequence[dict[str, Any]], ways: Sequence[str], note: str) -> list[str]:
    names = [f"{way} {rank}" for rank in RANKS for way in ways]
    titles = [f"rank {rank}, {WAYS[way]}" for rank in RANKS for way in ways]
    lines = ["", "| model, tokens | frozen | " + " | ".join(titles) + " |", "|---|" + "---|" * (1 + len(titles))]
    for entry in cases:
        found = entry["contenders"]
        frozen = f"{found[FROZEN]['ms']:.3f}"
        if "graph_ms" in found[FROZEN]:
            frozen += f" / {found[FROZEN]['graph_ms']:.3f}"
        if "kept_mib" in found[FROZEN]:
            frozen += f" / {found[FROZEN]['kept_mib']:.0f}"
        cells = " | ".join(_cell(found, name) for name in names)
        lines.append(f"| {entry['model']}, {entry['tokens']}{note} | {frozen} | {cells} |")
    return lines


def to_markdown(record: dict[str, Any]) -> str:
    run = record["run"]
    training, inference = (
        [entry for entry in record["cases"] if entry["what"] == what] for what in ("forward + backward", "forward")
    )
    lines = [
        "# LoRA on experts",
        "",
        f"{run['gpu']}, {run['dtype']}, torch {run['torch']}, {run['date']}.",
        f"{run['rounds']} rounds, in which all contenders take turns. One expert layer (SwiGLU, no biases) of each",
        "model's sizes on moegemm, random routing, adapters on both weights through PEFT with fp32 parameters,",
        "gradients for x and the adapters. Each figure also as a multiple of the bare frozen layer.",
    ]
    if training:
        lines += ["", "Training: milliseconds of forward and backward / MiB that the forward leaves allocated."]
        lines += _table(training, ("ours", "peft"), "")
    if inference:
        lines += [
            "",
            "Inference: milliseconds of a call, which may wait for its host, / of its replay as a CUDA graph. Factors",
            "are copied at every call, or kept (`moegemm.keep_factors`).",
        ]
        lines += _table(inference, ("ours", "kept", "peft"), " (inference)")
    differences = [d for entry in record["cases"] for d in entry["difference"].values()]
    if differences:
        lines += ["", f"Outputs differ from PEFT's by {statistics.median(differences):.1e} of their norm (median)."]
    return "\n".join(lines) + "\n"
