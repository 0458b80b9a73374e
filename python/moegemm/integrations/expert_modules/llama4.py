"""Llama 4's MoE block. It asks no interface: eager runs every expert on every token, scaled by the router's score.

The block hands its tokens, ids and scores to the experts module, as blocks of the interface do. So whatever is wrapped
around the experts (adapters, FSDP, tensor parallelism, offloading) runs before and after their forward.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from moegemm.integrations.expert_modules.experts import why_not
from moegemm.integrations.expert_modules.forwards import OnMoegemm, give_forward, take_forward_back, why_not_replaceable
from moegemm.integrations.expert_modules.own_modules import Form, run_as, stored_as
from moegemm.integrations.notices import say_once
from moegemm.integrations.peft_adapters import added_by_peft

FORM = Form(transposed=True)  # act_fn(gate) * up, concatenated


class Llama4Experts(OnMoegemm):
    """The experts: the score scales the expert's input, not its output."""

    def forward(self: Any, hidden_states: Tensor, ids: Tensor | None = None, scores: Tensor | None = None) -> Tensor:
        """[T, H], [T, topk] and [T, topk] -> [T, H]. Without ids what the module's own forward makes of its rows."""
        if ids is None or scores is None:
            with added_by_peft(self):
                return super().forward(hidden_states)  # type: ignore[misc,no-any-return]
        reason = why_not(stored_as(self, FORM))
        hidden = hidden_states.size(-1)
        if reason is not None:
            say_once(f"{type(self).__name__} runs its own eager code: {reason}")
            experts = self.gate_up_proj.shape[0]
            dense = torch.zeros_like(scores[:, :1].expand(-1, experts)).scatter(1, ids, scores)  # [T, E]
            routed = hidden_states.repeat(experts, 1) * dense.transpose(0, 1).reshape(-1, 1)
            with added_by_peft(self):
                own = super().forward(routed)  # type: ignore[misc]
            return own.reshape(experts, -1, hidden).sum(dim=0)  # type: ignore[no-any-return]
        scaled = (hidden_states.unsqueeze(1) * scores.unsqueeze(2)).reshape(-1, hidden)  # [T * topk, H]
        rows = run_as(self, FORM, scaled, ids.reshape(-1, 1), None)
        return rows.view(-1, ids.size(1), hidden).sum(dim=1)


class Llama4Block(OnMoegemm):
    """The block: router, experts, shared expert."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(innermost(self.experts), Llama4Experts):
            return super().forward(hidden_states)  # type: ignore[misc,no-any-return]
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        router_scores, router_logits = self.router(tokens)
        ids = torch.topk(router_logits, self.top_k, dim=1).indices
        routed = self.experts(tokens, ids, router_scores.gather(1, ids))
        return self.shared_expert(tokens) + routed, router_logits


def innermost(module: Any) -> Any:
    """The module that adapters were put around."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _is_a(class_name: str, module: Any) -> bool:
    """By name: a release of transformers may have no such class, or nobody has imported it."""
    return any(base.__name__ == class_name for base in type(module).__mro__)


def is_block(module: Any) -> bool:
    return _is_a("Llama4TextMoe", module)


def adopt(block: Any) -> str | None:
    """Makes a block and its experts run on moegemm, or says why not."""
    experts = innermost(block.experts)
    if not _is_a("Llama4TextExperts", experts):
        return f"its experts are a {type(experts).__name__}, not Llama 4's own"
    for module in (block, experts):
        reason = why_not_replaceable(module)
        if reason is not None:
            return f"{type(module).__name__}: {reason}"
    give_forward(block, Llama4Block)
    give_forward(experts, Llama4Experts)
    return None


def leave(block: Any) -> None:
    """The forwards of transformers again."""
    experts = innermost(block.experts)
    if isinstance(experts, Llama4Experts):
        take_forward_back(experts)
    take_forward_back(block)


def follow_config(name: str) -> None:
    """From now on blocks are made to run on moegemm where their config asks for the experts implementation `name`."""
    try:
        llama4: Any = importlib.import_module("transformers.models.llama4.modeling_llama4")
        block_class: Any = llama4.Llama4TextMoe
    except (ImportError, AttributeError):  # a release without Llama 4
        return
    own_init = block_class.__init__
    if hasattr(own_init, "__wrapped__"):
        return

    @functools.wraps(own_init)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        own_init(self, config, *args, **kwargs)
        if getattr(config, "_experts_implementation", None) == name:
            reason = adopt(self)
            if reason is not None:
                say_once(f"{type(self).__name__} runs its own code: {reason}")

    block_class.__init__ = init
