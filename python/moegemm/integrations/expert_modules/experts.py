"""The forward of an experts module: the whole layer in one call, or moegemm's products around code of the module."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import Activation
from moegemm.expert_layer.arguments import row_weights_like
from moegemm.expert_layer.layer import Routed, moe_mlp
from moegemm.formats import FORMATS, NAMES
from moegemm.integrations.expert_modules.gates import activation_of
from moegemm.integrations.expert_modules.packed_experts import is_packed, packed_weight, require_packed_experts
from moegemm.integrations.expert_parallel import ids_of_others_remain, rows_needed
from moegemm.integrations.notices import say_once
from moegemm.integrations.peft_adapters import adapters_of, added_by_peft
from moegemm.lora.layer import lora_moe_mlp
from moegemm.lora.low_rank import LowRank
from moegemm.lora.products import adapted_first, adapted_second
from moegemm.operators.packed import Packed
from moegemm.operators.raw import autocast_dtype, torch_allows_tf32
from moegemm.routing import combine, route


class Stored(NamedTuple):
    """The weights of a layer as its module keeps them."""

    first: Any  # [E, C, H], or [E, H, C] with transposed
    second: Any  # [E, H, I], or [E, I, H]
    first_bias: Tensor | None  # [E, C]
    second_bias: Tensor | None  # [E, H]
    transposed: bool
    first_adapters: tuple[LowRank, ...] = ()
    second_adapters: tuple[LowRank, ...] = ()

    def with_biases_in(self, dtype: torch.dtype) -> "Stored":
        first, second = (None if bias is None else bias.to(dtype) for bias in (self.first_bias, self.second_bias))
        return self._replace(first_bias=first, second_bias=second)

    def with_adapters(self, module: Any, first_name: str, dtype: torch.dtype) -> "Stored":
        """With those that are active on the module's two weights, for activations in this dtype."""
        return self._replace(
            first_adapters=adapters_of(module, first_name, self.transposed, dtype),
            second_adapters=adapters_of(module, "down_proj", self.transposed, dtype),
        )


def why_not(stored: Stored, placed_later: bool = False) -> str | None:
    """Why our kernels do not take these weights, or None. With `placed_later` their device does not count yet."""
    for name, w in (("first", stored.first), ("second", stored.second)):
        if isinstance(w, str):
            return w
        if not isinstance(w, Packed):
            if not isinstance(w, Tensor) or w.dim() != 3:
                return f"the {name} product's weights are not one [E, ...] tensor"
            if w.dtype not in FORMATS:
                return f"the {name} product's weights are {w.dtype}; accepted are {NAMES}"
        if w.device.type not in ("cpu", "cuda") and not placed_later:
            return f"the {name} product's weights are on {w.device.type}, not on cpu or cuda"
    return None


def run_with_own_activation(
    x: Tensor, stored: Stored, ids: Tensor, router_weights: Tensor | None, gate: Callable[[Tensor], Tensor],
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Our products and top-k sum around an activation (and a norm) that torch runs."""
    topk, experts = ids.size(1), stored.first.size(0)
    tf32 = torch_allows_tf32(x)
    m_sizes, gather_indices = route(ids, experts)
    routed = Routed(m_sizes, gather_indices, topk)
    flat_ids = ids.reshape(-1)
    mine = ((flat_ids >= 0) & (flat_ids < experts)).unsqueeze(-1)
    known_ids = flat_ids.clamp(0, experts - 1)
    h = adapted_first(x, stored.first, stored.first_adapters, routed, stored.transposed, tf32)
    if stored.first_bias is not None:
        h = h + stored.first_bias[known_ids[gather_indices.long()]]
    h = gate(h).to(x.dtype)
    y = adapted_second(h, stored.second, stored.second_adapters, routed, stored.transposed, tf32)
    if stored.second_bias is not None:
        y = y + stored.second_bias[known_ids]
    if norm is not None:
        y = norm(y)
    # Rows without an expert of ours were zero; a bias or a norm may have changed them.
    y = y.masked_fill(~mine, 0.0)
    if router_weights is not None:
        router_weights = row_weights_like("router_weights", router_weights, y)
    return combine(y, router_weights, topk)


def run_experts(
    name: str, x: Tensor, stored: Stored, ids: Tensor, router_weights: Tensor | None, activation: Activation | None,
    gate: Callable[[Tensor], Tensor], norm: Callable[[Tensor], Tensor] | None = None, split: bool = False,
) -> Tensor:  # fmt: skip
    """The layer [T, H] -> [T, H] of the module called `name`; `gate` is its own code for an activation of None. With
    `split` most ids are those of other ranks' experts."""
    if activation is not None and norm is None:
        tensors = x, stored.first, stored.second, ids, router_weights
        options: Any = {
            "activation": activation, "transposed": stored.transposed, "gate_up_bias": stored.first_bias,
            "down_bias": stored.second_bias, "max_rows": rows_needed(ids, stored.first.size(0)) if split else None,
        }  # fmt: skip
        if stored.first_adapters or stored.second_adapters:
            return lora_moe_mlp(*tensors, stored.first_adapters, stored.second_adapters, **options)
        return moe_mlp(*tensors, **options)
    what = "its norm" if activation is not None else "its activation"
    say_once(f"{name} runs {what} in torch, between moegemm's products: no kernel has it")
    return run_with_own_activation(x, stored, ids, router_weights, gate, norm)


def stored_in(module: Any) -> Stored:
    """The weights of a module of transformers' experts interface."""
    gated = getattr(module, "has_gate", True)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if getattr(module, "has_bias", False):
        biases = (module.gate_up_proj_bias if gated else module.up_proj_bias, module.down_proj_bias)
    first, second = (_weight_of(module, name) for name in ("gate_up_proj" if gated else "up_proj", "down_proj"))
    return Stored(first, second, *biases, getattr(module, "is_transposed", False))


def _weight_of(module: Any, name: str) -> Any:
    """The weight as the products take it, or why they do not."""
    try:
        packed = packed_weight(module, name)
    except ValueError as error:
        return str(error)
    return getattr(module, name) if packed is None else packed


def _activations_of(stored: Stored, hidden_states: Tensor) -> torch.dtype:
    """What the products read: the weights' dtype, or with quantised weights that of the activations."""
    if not isinstance(stored.first, Packed):
        return stored.first.dtype  # type: ignore[no-any-return]
    given = autocast_dtype(hidden_states.device) or hidden_states.dtype
    return given if given in FORMATS else torch.float32


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module: hidden_states [T, H], top_k_index and top_k_weights [T, topk] -> [T, H]."""
    require_packed_experts(module)
    stored = stored_in(module)
    reason = why_not(stored)
    if reason is not None and is_packed(module):
        raise RuntimeError(f"{type(module).__name__} has quantised weights, which its own code cannot read: {reason}")
    if reason is not None:
        say_once(f"{type(module).__name__} runs its own eager code: {reason}")
        with added_by_peft(module):
            eager: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
            return eager(module, hidden_states, top_k_index, top_k_weights)
    split = ids_of_others_remain(module, hidden_states)
    return run_stored(module, stored, hidden_states, top_k_index, top_k_weights, split)


def run_stored(
    module: Any, stored: Stored, tokens: Tensor, ids: Tensor, router_weights: Tensor | None, split: bool
) -> Tensor:
    """The layer of a module of transformers' experts interface, on weights of it that our kernels take."""
    gated = getattr(module, "has_gate", True)
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    dtype = _activations_of(stored, tokens)
    stored = stored.with_adapters(module, "gate_up_proj" if gated else "up_proj", dtype).with_biases_in(dtype)
    out = run_experts(
        type(module).__name__, tokens.to(dtype), stored, ids, router_weights, activation_of(module, gated),
        module._apply_gate if gated else module.act_fn, norm, split,
    )  # fmt: skip
    return out.to(tokens.dtype)
