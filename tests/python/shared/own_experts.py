"""Experts modules that no interface describes, as people write them. At the top of a module, so that they pickle."""

import torch
from torch import nn


class OwnExperts(nn.Module):
    """act_fn(gate) * up, [E, 2 I, H] and [E, H, I]."""

    def __init__(self, experts: int = 4, hidden: int = 16, inner: int = 24) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * 0.3)
        self.act_fn = nn.SiLU()

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows @ self.gate_up_proj[e].T) @ self.down_proj[e].T

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for e in range(self.gate_up_proj.size(0)):
            token, slot = torch.where(chosen == e)
            rows = self.expert(e, tokens[token]) * weights[token, slot, None]
            out = out.index_add(0, token, rows.to(out.dtype))
        return out


class Interleaved(OwnExperts):
    def inner(self, h):
        return self.act_fn(h[..., ::2]) * h[..., 1::2]


class Clamped(OwnExperts):
    """gpt-oss's clamp and offset around act_fn, with the limit in an attribute."""

    limit = 25.0

    def inner(self, h):
        gate, up = h.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * (up.clamp(-self.limit, self.limit) + 1)


class Transposed(OwnExperts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.data.transpose(1, 2).contiguous())
        self.down_proj = nn.Parameter(self.down_proj.data.transpose(1, 2).contiguous())

    def expert(self, e, rows):
        return self.inner(rows @ self.gate_up_proj[e]) @ self.down_proj[e]


class Biased(OwnExperts):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 48))
        self.down_proj_bias = nn.Parameter(torch.randn(4, 16))

    def expert(self, e, rows):
        h = self.inner(rows @ self.gate_up_proj[e].T + self.gate_up_proj_bias[e])
        return h @ self.down_proj[e].T + self.down_proj_bias[e]


class BiasedInSingle(Biased):
    """Biases that stay in fp32 whatever the weights are in."""

    def expert(self, e, rows):
        h = self.inner((rows @ self.gate_up_proj[e].T + self.gate_up_proj_bias[e]).to(rows.dtype))
        return (h @ self.down_proj[e].T + self.down_proj_bias[e]).to(rows.dtype)

    def rounded(self, dtype):
        self.gate_up_proj.data, self.down_proj.data = self.gate_up_proj.to(dtype), self.down_proj.to(dtype)
        return self


class DownInSingle(OwnExperts):
    """Two weights in two dtypes."""

    def expert(self, e, rows):
        h = self.inner(rows.to(self.gate_up_proj.dtype) @ self.gate_up_proj[e].T)
        return h.float() @ self.down_proj[e].T


class GatedByMethod(OwnExperts):
    def _apply_gate(self, h):
        return self.inner(h)


class TanhGated(OwnExperts):
    """An activation that no kernel has."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.Tanh()


class Scaled(OwnExperts):
    """A factor that only the forward knows of."""

    def forward(self, tokens, chosen, weights):
        return 2.5 * super().forward(tokens, chosen, weights)


class ScaledWhileTraining(OwnExperts):
    def forward(self, tokens, chosen, weights):
        return super().forward(tokens, chosen, weights) * (1.5 if self.training else 1.0)


class ClampedInSecret(OwnExperts):
    def inner(self, h):
        return super().inner(h.clamp(max=50.0))


class Normalised(OwnExperts):
    """Router weights that the forward divides by their sum."""

    def forward(self, tokens, chosen, weights):
        return super().forward(tokens, chosen, weights / weights.sum(-1, keepdim=True))


class LastIsIdentity(OwnExperts):
    """Many experts, the last of which leaves its rows alone."""

    def __init__(self) -> None:
        super().__init__(experts=64)

    def expert(self, e, rows):
        return rows if e == 63 else super().expert(e, rows)


class OtherOrder(OwnExperts):
    def forward(self, tokens, weights, chosen):
        return super().forward(tokens, chosen, weights)


class OtherBias(OwnExperts):
    """A bias under a name that nobody knows, still zero."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(16))

    def forward(self, tokens, chosen, weights):
        return super().forward(tokens, chosen, weights) + self.offset


class NoActivation(OwnExperts):
    def __init__(self) -> None:
        super().__init__()
        del self.act_fn

    def inner(self, h):
        gate, up = h.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


class Zero(OwnExperts):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down_proj)


class TwoArguments(OwnExperts):
    def forward(self, tokens, routing):
        return super().forward(tokens, *routing)


KNOWN = [OwnExperts, Interleaved, Clamped, Transposed, Biased, GatedByMethod, TanhGated]
REFUSED = {
    Scaled: "computes something else",
    ScaledWhileTraining: "computes something else",
    ClampedInSecret: "computes something else",
    Normalised: "computes something else",
    LastIsIdentity: "computes something else",
    OtherOrder: "its forward gives zeros.*in this order",
    OtherBias: "weights that moegemm does not know what to do with: offset",
    NoActivation: "neither act_fn nor _apply_gate",
    Zero: "its forward gives zeros.*patch it after loading",
    TwoArguments: r"its forward takes \['tokens', 'routing'\]",
}
