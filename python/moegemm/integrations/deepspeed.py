"""DeepSpeed AutoEP's experts on moegemm: `use_moegemm()` once, before or after the model is made.

AutoEP hands its GroupedExperts rows that are sorted by expert and their counts; everything around them, its exchange
and ZeRO stay what they are. For deepspeed 0.19, whose later releases know the activations below, and others SwiGLU.
"""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moegemm.expert_layer.expert_major import experts_mlp

_own_forward: Callable[..., Tensor] | None = None


def _activation_of(experts: Any) -> dict[str, Any] | None:
    """The keyword arguments of `experts_mlp` for AutoEP's name of an activation; None for one that no kernel has."""
    if not hasattr(experts, "activation"):
        return {"activation": "swiglu"}
    known: dict[str, dict[str, Any]] = {
        "swiglu": {"activation": "swiglu"},
        "geglu_tanh": {"activation": "geglu_tanh"},
        "swiglu_clamped": {"activation": "swiglu", "limit": experts.activation_limit},
        "swiglu_oai": {
            "activation": "clamped_swiglu", "alpha": experts.activation_alpha, "limit": experts.activation_limit,
        },
    }  # fmt: skip
    return known.get(experts.activation)


def grouped_experts_forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """x [R, H] sorted by expert, num_tokens_per_expert [E] -> [R, H]."""
    described = _activation_of(self)
    if described is None:
        assert _own_forward is not None
        return _own_forward(self, x, num_tokens_per_expert)
    gate, up, down = (w.to(x.dtype) for w in (self.w1, self.w3, self.w2))
    return experts_mlp(x, (gate, up), down, num_tokens_per_expert.to(x.device), **described)


def use_moegemm() -> None:
    """From now on every GroupedExperts of AutoEP runs on moegemm; one with an activation of others its own code."""
    global _own_forward
    try:
        experts: Any = importlib.import_module("deepspeed.moe.ep_experts")
    except ImportError as error:
        raise ImportError(f"moegemm.integrations.deepspeed needs deepspeed 0.19 with AutoEP: {error}") from error
    kind = experts.GroupedExperts
    if kind.forward is not grouped_experts_forward:
        _own_forward = kind.forward
        kind.forward = grouped_experts_forward


def use_own() -> None:
    """Undoes `use_moegemm`."""
    global _own_forward
    if _own_forward is not None:
        importlib.import_module("deepspeed.moe.ep_experts").GroupedExperts.forward = _own_forward
        _own_forward = None
