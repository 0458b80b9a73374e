"""The expert layer in plain torch: one loop over experts, differentiable by torch, run in float64 by the tests."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor

GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "clamped_swiglu")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu2", "relu")


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu2": lambda x: F.relu(x) ** 2,
    "reglu": F.relu,
    "relu": F.relu,
}


@dataclass
class Layer:
    """One call of moe_mlp. `tensors` are the differentiable ones by argument name; None where not given."""

    tensors: dict[str, Tensor | None]
    expert_ids: Tensor
    options: dict = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype | None = None) -> "Layer":
        """The same values as leaves of a new graph."""
        copies = {
            name: None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_()
            for name, t in self.tensors.items()
        }
        return Layer(copies, self.expert_ids, self.options)

    def given(self) -> dict[str, Tensor]:
        return {name: t for name, t in self.tensors.items() if t is not None}


def make_layer(
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    tokens: int = 13,
    hidden: int = 24,
    inner: int = 40,
    experts: int = 6,
    topk: int = 3,
    activation: str = "swiglu",
    layout: str = "concatenated",
    transposed: bool = False,
    bias: bool = False,
    weights_dtype: torch.dtype = torch.float32,
    **options: float,
) -> Layer:
    """Random tensors; expert 1 stays empty and some slots belong to no expert of this rank."""
    columns = 2 * inner if activation in GATED else inner
    gate_up = torch.randn(experts, columns, hidden) * 2 * hidden**-0.5
    down = torch.randn(experts, hidden, inner) * inner**-0.5
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    ids = torch.randint(-1, experts, (tokens, topk))
    ids[ids == 1] = 0
    tensors = {
        "x": torch.randn(tokens, hidden).to(device, dtype),
        "w_gate_up": gate_up.to(device, dtype),
        "w_down": down.to(device, dtype),
        "router_weights": torch.rand(tokens, topk).to(device, weights_dtype),
        "gate_up_bias": torch.randn(experts, columns).to(device, dtype) if bias else None,
        "down_bias": torch.randn(experts, hidden).to(device, dtype) if bias else None,
    }
    options = {"activation": activation, "layout": layout, "transposed": transposed, **options}
    return Layer(tensors, ids.to(device), options)


def activate(h: Tensor, options: dict) -> Tensor:
    name = options["activation"]
    if name in UNGATED:
        return FUNCTIONS[name](h)
    gate, up = h.chunk(2, -1) if options["layout"] == "concatenated" else (h[..., ::2], h[..., 1::2])
    if name != "clamped_swiglu":
        return FUNCTIONS[name](gate) * up
    limit = options.get("limit", 7.0)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(options.get("alpha", 1.702) * gate) * (up + 1)


def reference_layer(layer: Layer) -> Tensor:
    t = layer.tensors
    x, ids, weights = t["x"], layer.expert_ids, t["router_weights"]
    out = torch.zeros_like(x)
    for expert in range(t["w_down"].size(0)):
        token, slot = torch.where(ids == expert)
        gate_up, down = t["w_gate_up"][expert], t["w_down"][expert]
        if not layer.options["transposed"]:
            gate_up, down = gate_up.T, down.T
        h = x[token] @ gate_up
        if t["gate_up_bias"] is not None:
            h = h + t["gate_up_bias"][expert]
        y = activate(h, layer.options) @ down
        if t["down_bias"] is not None:
            y = y + t["down_bias"][expert]
        if weights is not None:
            y = y * weights[token, slot, None]
        out = out.index_add(0, token, y)
    return out


def reference_gradients(layer: Layer, d_out: Tensor) -> dict[str, Tensor]:
    """The output (as "out") and the gradient of every given tensor, in float64."""
    exact = layer.leaves(torch.float64)
    out = reference_layer(exact)
    given = exact.given()
    gradients = torch.autograd.grad(
        out, list(given.values()), d_out.double(), allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach(), **dict(zip(given, gradients, strict=True))}


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(got).all()
    return ((got.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()
