"""One expert layer, run by moegemm and by transformers on the same weights."""

from collections.abc import Callable
from dataclasses import dataclass, field

import moegemm
import torch
from moegemm.bench.cases import Model
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

GPT_OSS = ("gpt-oss-20b", "gpt-oss-120b")
ALPHA, LIMIT = 1.702, 7.0

# Router weights in the model's dtype, as most routers of transformers hand them over. With fp32 ones (Mixtral,
# DeepSeek-V3) grouped_mm multiplies and permutes its [M, H] rows in fp32, which makes it slower and us look better.
HEADLINE = "bf16 router weights"
FP32_WEIGHTS = "fp32 router weights"
# gpt-oss in the plain layout: transformers' gradient of a bias is a scatter over all rows, which costs it dearly.
NO_BIASES = "no biases"


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def clamped_swiglu(h: Tensor) -> Tensor:
    """gpt-oss's gate, as transformers writes it."""
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(min=None, max=LIMIT), up.clamp(min=-LIMIT, max=LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))


class Experts(nn.Module):
    """What transformers' experts functions read from a module."""

    has_gate, has_post_expert_norm, _is_expert_parallel = True, False, False

    def __init__(self, model: Model, dtype: torch.dtype, device: str, plain: bool = False) -> None:
        super().__init__()
        self.num_experts = experts = model.experts
        hidden, inner = model.hidden, model.intermediate
        self.is_transposed = self.has_bias = model.name in GPT_OSS and not plain
        self.is_concatenated = not self.is_transposed
        first, second = (experts, 2 * inner, hidden), (experts, hidden, inner)
        if self.is_transposed:
            first, second = (experts, hidden, 2 * inner), (experts, inner, hidden)

        def parameter(*shape: int, scale: float) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(std=scale))

        self.gate_up_proj = parameter(*first, scale=hidden**-0.5)
        self.down_proj = parameter(*second, scale=inner**-0.5)
        if self.has_bias:
            self.gate_up_proj_bias = parameter(experts, 2 * inner, scale=0.1)
            self.down_proj_bias = parameter(experts, hidden, scale=0.1)

    def _apply_gate(self, h: Tensor) -> Tensor:
        return clamped_swiglu(h) if self.has_bias else swiglu(h)


@dataclass
class Layer:
    """A layer with its inputs; `calls` are the contenders' forward passes."""

    experts: Experts
    x: Tensor
    ids: Tensor
    router_weights: Tensor
    d_out: Tensor
    calls: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, tokens: int, dtype: torch.dtype, device: str, variant: str = HEADLINE) -> "Layer":
        torch.manual_seed(0)
        experts = Experts(model, dtype, device, plain=variant == NO_BIASES)
        x = torch.randn(tokens, model.hidden, device=device).to(dtype).requires_grad_()
        scores, ids = torch.randn(tokens, model.experts, device=device).softmax(-1).topk(model.topk)
        weights = (scores / scores.sum(-1, keepdim=True)).detach()
        weights = (weights if variant == FP32_WEIGHTS else weights.to(dtype)).requires_grad_()
        layer = cls(experts, x, ids, weights, torch.randn_like(x))
        layer.calls = {"moegemm": layer.by_moegemm, "grouped_mm": layer.by_transformers}
        return layer

    def by_transformers(self) -> Tensor:
        return grouped_mm_experts_forward(self.experts, self.x, self.ids, self.router_weights)

    def by_moegemm(self) -> Tensor:
        e = self.experts
        options = {"activation": "swiglu"}
        if e.has_bias:
            options = {
                "activation": "clamped_swiglu", "layout": "interleaved", "transposed": True,
                "gate_up_bias": e.gate_up_proj_bias, "down_bias": e.down_proj_bias,
            }  # fmt: skip
        return moegemm.moe_mlp(self.x, e.gate_up_proj, e.down_proj, self.ids, self.router_weights, **options)

    def leaves(self) -> dict[str, Tensor]:
        return {"x": self.x, "router_weights": self.router_weights, **dict(self.experts.named_parameters())}

    def clear_gradients(self) -> None:
        for leaf in self.leaves().values():
            leaf.grad = None

    def forward(self, name: str) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                self.calls[name]()

        return run

    def forward_backward(self, name: str) -> Callable[[], object]:
        def run() -> None:
            self.clear_gradients()
            self.calls[name]().backward(self.d_out)

        return run
