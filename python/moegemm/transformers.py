"""moegemm as an experts implementation of Hugging Face transformers.

>>> import moegemm.transformers  # doctest: +SKIP
>>> model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moegemm")  # doctest: +SKIP

or, for a model that is there already, `moegemm.patch(model)`. Routers, attention and everything else are left alone.
"""

import importlib
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moegemm.gates import activation_of
from moegemm.layer import Routed, moe_mlp
from moegemm.operators import flags as bits
from moegemm.operators.raw import torch_allows_tf32
from moegemm.products import first_product, second_product
from moegemm.routing import combine, route

NAME = "moegemm"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_said: set[str] = set()


def _say_once(reason: str) -> None:
    if reason not in _said:
        _said.add(reason)
        warnings.warn(f"moegemm: {reason}", UserWarning, stacklevel=4)


_say_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # while tracing, not in the graph


def _interface() -> Any:
    try:
        moe: Any = importlib.import_module("transformers.integrations.moe")
    except ImportError as error:
        raise ImportError(
            "moegemm.transformers found no experts interface (transformers.integrations.moe) in this transformers; "
            "transformers 5.0 or newer is needed"
        ) from error
    return moe.ALL_EXPERTS_FUNCTIONS


def _why_not(first: Any, second: Any) -> str | None:
    """Why these weights are not for our kernels, or None."""
    for name, w in (("first", first), ("second", second)):
        if not isinstance(w, Tensor) or w.dim() != 3:
            return f"the {name} product's weights are not one [E, ...] tensor"
        if w.dtype not in _DTYPES:
            return f"the {name} product's weights are {w.dtype}, not bf16, fp16 or fp32"
        if w.device.type not in ("cpu", "cuda"):
            return f"the {name} product's weights are on {w.device.type}, not on cpu or cuda"
    return None


def _with_own_activation(
    module: Any, x: Tensor, first: Tensor, second: Tensor, ids: Tensor, router_weights: Tensor, gated: bool,
    transposed: bool, biases: tuple[Tensor | None, Tensor | None],
) -> Tensor:  # fmt: skip
    """Our products and top-k sum around the module's own activation (and norm), run by torch."""
    topk = ids.size(1)
    tf32 = bits.ALLOW_TF32 if torch_allows_tf32(x) else 0
    m_sizes, gather_indices = route(ids, first.size(0))
    routed = Routed(m_sizes, gather_indices, topk)
    flat_ids = ids.reshape(-1)
    mine = ((flat_ids >= 0) & (flat_ids < first.size(0))).unsqueeze(-1)
    known_ids = flat_ids.clamp(0, first.size(0) - 1)
    h = first_product(x, first, routed, transposed, tf32)
    if biases[0] is not None:
        h = h + biases[0][known_ids[routed.gather_indices.long()]]
    h = module._apply_gate(h) if gated else module.act_fn(h)
    y = second_product(h.to(second.dtype), second, routed, transposed, tf32)
    if biases[1] is not None:
        y = y + biases[1][known_ids]
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    # A bias or a norm has made something of the zero rows that belong to no expert of ours.
    y = y.masked_fill(~mine, 0.0)
    if router_weights.dtype not in (torch.float32, y.dtype):
        router_weights = router_weights.float()
    return combine(y, router_weights)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module: hidden_states [T, H], top_k_index and top_k_weights [T, topk] -> [T, H]."""
    gated = getattr(module, "has_gate", True)
    transposed = getattr(module, "is_transposed", False)
    first: Any = module.gate_up_proj if gated else module.up_proj
    second: Any = module.down_proj
    reason = _why_not(first, second)
    if reason is not None:
        _say_once(f"{type(module).__name__} runs its own eager code: {reason}")
        eager: Callable[..., Tensor] = inspect.unwrap(type(module).forward)
        return eager(module, hidden_states, top_k_index, top_k_weights)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)
    if getattr(module, "has_bias", False):
        biases = (module.gate_up_proj_bias if gated else module.up_proj_bias, module.down_proj_bias)
    x = hidden_states.to(first.dtype)
    activation = activation_of(module, gated)
    if activation is not None and not getattr(module, "has_post_expert_norm", False):
        out = moe_mlp(
            x, first, second, top_k_index, top_k_weights, activation, transposed=transposed, gate_up_bias=biases[0],
            down_bias=biases[1],
        )  # fmt: skip
    else:
        what = "its norm" if activation is not None else "its activation"
        _say_once(f"{type(module).__name__} runs {what} in torch, between moegemm's products: no kernel has it")
        out = _with_own_activation(module, x, first, second, top_k_index, top_k_weights, gated, transposed, biases)
    return out.to(hidden_states.dtype)


def _llama4_forward(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's MoE block: the router's score scales the expert's input, and eager runs every expert on every token."""
    tokens = hidden_states.reshape(-1, module.hidden_dim)
    router_scores, router_logits = module.router(tokens)
    experts = module.experts
    ids = torch.topk(router_logits, module.top_k, dim=1).indices
    scores = router_scores.gather(1, ids)
    scaled = (tokens.unsqueeze(1) * scores.unsqueeze(2)).reshape(-1, module.hidden_dim)  # [T * topk, H]
    rows = moe_mlp(
        scaled, experts.gate_up_proj, experts.down_proj, ids.reshape(-1, 1), None,
        activation_of_llama4(experts), transposed=True,
    )  # fmt: skip
    out = module.shared_expert(tokens)
    return out + rows.view(-1, module.top_k, module.hidden_dim).sum(dim=1), router_logits


def activation_of_llama4(experts: Any) -> Any:
    """Its experts have an act_fn and multiply by the concatenated up columns, without saying so."""
    plain = activation_of(experts, False)
    if plain is None:
        raise NotImplementedError(f"{type(experts).__name__} has an activation that moegemm has no kernel for")
    return plain._replace(layout=1)


def _infer_transposed(module: Any) -> bool | None:
    """Whether gate_up_proj is [E, H, 2 I] (else [E, 2 I, H]), or None if its shapes do not tell."""
    _, a, b = module.gate_up_proj.shape
    _, c, d = module.down_proj.shape
    plain, transposed = (a == 2 * d and b == c), (b == 2 * c and a == d)
    return transposed if plain != transposed else None


def _is_experts(module: Any) -> bool:
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(w, Tensor) and w.dim() == 3 for w in weights):
        return False
    return len(inspect.signature(module.forward).parameters) in (2, 3) or hasattr(module, "_apply_gate")


def _patch_module(module: Any) -> bool:
    """Gives one module our forward; False if it is none that we know."""
    if type(module).__name__ == "Llama4TextMoe":
        module.forward = types.MethodType(_llama4_forward, module)
        return True
    if not _is_experts(module) or len(inspect.signature(module.forward).parameters) != 3:
        return False
    if not hasattr(module, "is_transposed"):
        transposed = _infer_transposed(module)
        if transposed is None:
            return False
        module.is_transposed = transposed
    module.forward = types.MethodType(experts_forward, module)
    return True


def _dispatched(module: Any) -> bool:
    """Whether transformers asks its experts interface in this module's forward."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate") and hasattr(module, "config")


def _is_expert_mlp(module: Any) -> bool:
    names = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
    return any(all(isinstance(getattr(module, name, None), nn.Linear) for name in trio) for trio in names)


def _separate_experts(modules: list[Any]) -> str | None:
    """A sentence about the first block whose experts are modules of their own, or None."""
    for block in modules:
        for name, child in block.named_children():
            if isinstance(child, nn.ModuleList) and len(child) > 1 and all(map(_is_expert_mlp, child)):
                return (
                    f"{type(block).__name__}.{name} is a ModuleList of {len(child)} experts with weights of their own. "
                    "A grouped product needs them as one [E, ...] tensor, and a stacked copy would double their memory "
                    "or leave the model's parameters, optimizer and checkpoints without them. Load the model with "
                    "transformers 5, which stacks expert weights while loading, or stack them where the model is "
                    "defined and call moegemm.moe_mlp there"
                )
    return None


def patch(model: nn.Module) -> nn.Module:
    """Makes every expert layer of a model run on moegemm, in place, and returns the model.

    Modules behind transformers' experts interface are switched through their config. Others are recognised by their
    parts: Llama 4's block, and modules with gate_up_proj and down_proj that take (hidden_states, ids, weights). Experts
    that are modules of their own (a ModuleList) are refused, or left alone with a warning if other layers are patched.
    """
    register()
    patched = 0
    modules: list[Any] = list(model.modules())
    for module in modules:
        if _dispatched(module):
            module.config._experts_implementation_internal = NAME
            patched += 1
        elif _patch_module(module):
            patched += 1
    separate = _separate_experts(modules)
    if separate is not None:
        if patched == 0:
            raise ValueError(f"{type(model).__name__}: {separate}")
        _say_once(f"an expert layer runs its own code: {separate}")
    if patched == 0:
        raise ValueError(
            f"{type(model).__name__} has no expert layer that moegemm knows: none behind transformers' experts "
            "interface, no Llama 4 block, and no module with three-dimensional gate_up_proj and down_proj that takes "
            "(hidden_states, expert_ids, router_weights)"
        )
    return model


def register() -> None:
    """Puts "moegemm" into transformers' experts interface; importing this module does it."""
    interface = _interface()
    if NAME not in interface:
        interface.register(NAME, experts_forward)


register()
