"""Makes a model that is there already run on moegemm, undoes it, and says what runs where."""

import sys
import weakref
from typing import Any, NamedTuple

from torch import nn

from moegemm.integrations.expert_modules import llama4, own_modules
from moegemm.integrations.expert_modules.forwards import OnMoegemm
from moegemm.integrations.expert_modules.packed_experts import is_dispatched
from moegemm.integrations.notices import say_once
from moegemm.integrations.peft_adapters import NAME, follow_peft
from moegemm.integrations.registration import register

_REFUSAL = "_moegemm_refusal"
_BEFORE = "_moegemm_before"


class Before(NamedTuple):
    """The experts implementation that a module's config had."""

    implementation: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _before_again, (self.implementation,)


def _before_again(implementation: str | None) -> Before:
    """Loading a pickled model registers the implementation that its config names."""
    register()
    return Before(implementation)


# What configs had, by their id: they have no hash, and would save an attribute of ours.
_of_configs: dict[int, tuple[weakref.ref[Any], Before]] = {}


def _remember(config: Any, before: Before) -> None:
    key = id(config)
    _of_configs[key] = weakref.ref(config, lambda _: _of_configs.pop(key, None)), before


def _before_of(config: Any) -> Before | None:
    """What it had when a model with it was patched, or None."""
    known, before = _of_configs.get(id(config), (None, None))
    return before if known is not None and known() is config else None


def _is_expert_mlp(module: Any) -> bool:
    names = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
    return any(all(isinstance(getattr(module, name, None), nn.Linear) for name in trio) for trio in names)


def separate_experts(block: Any) -> str | None:
    """A sentence about a block whose experts are modules of their own, or None."""
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


def _adopt(module: Any) -> str | None:
    """Makes one layer run on moegemm, or says why not. The layer is one of those that patch recognises."""
    if isinstance(module, OnMoegemm):
        return None
    reason = llama4.adopt(module) if llama4.is_block(module) else own_modules.adopt(module)
    vars(module).pop(_REFUSAL, None)
    if reason is not None:
        vars(module)[_REFUSAL] = reason
    return reason


def is_own_layer(module: Any, parts: set[Any]) -> bool:
    """Whether a module is a layer that gets a forward of ours, not part of one."""
    if llama4.is_block(module):
        parts.update(module.experts.modules())
        return True
    return module not in parts and own_modules.is_experts(module)


def patch(model: nn.Module) -> nn.Module:
    """Makes every expert layer of a model run on moegemm, in place, and returns the model.

    Modules of transformers' experts interface are switched through their config. Others are recognised by their parts:
    Llama 4's block, and modules with gate_up_proj and down_proj that take (hidden_states, ids, weights), which are
    compared once with their own forward. What is not known, or computes something else, is refused with the reason, or
    left alone with a warning if other layers are patched. `moegemm.report` lists all of them, `moegemm.unpatch`
    undoes it.
    """
    if "transformers" in sys.modules:
        register()
    follow_peft()
    modules: list[Any] = list(model.modules())
    dispatched = [module for module in modules if is_dispatched(module)]
    before = [module.config._experts_implementation for module in dispatched]
    for module, implementation in zip(dispatched, before, strict=True):
        if implementation != NAME:
            _remember(module.config, Before(implementation))
        known = _before_of(module.config)
        if known is not None:
            vars(module)[_BEFORE] = known  # pickles and copies have it too
        module.config._experts_implementation_internal = NAME
    parts: set[Any] = set(dispatched)
    layers = [module for module in modules if is_own_layer(module, parts)]
    reasons = [(module, _adopt(module)) for module in layers]
    patched = len(dispatched) + sum(reason is None for _, reason in reasons)
    refusals = [
        reason if module is model else f"{type(module).__name__}: {reason}"
        for module, reason in reasons
        if reason is not None
    ]
    refusals += [reason for reason in map(separate_experts, modules) if reason is not None]
    if patched == 0 and refusals:
        raise ValueError(f"{type(model).__name__}: {refusals[0]}")
    for refusal in refusals:
        say_once(f"an expert layer runs its own code: {refusal}")
    if patched == 0:
        raise ValueError(
            f"{type(model).__name__} has no expert layer that moegemm knows: none of transformers' experts interface, "
            "no Llama 4 block, and no module with three-dimensional gate_up_proj and down_proj that takes "
            "(hidden_states, expert_ids, router_weights)"
        )
    return model


def _default_implementation() -> str:
    moe: Any = sys.modules["transformers.integrations.moe"]
    return "grouped_mm" if "grouped_mm" in moe.ALL_EXPERTS_FUNCTIONS else "eager"


def unpatch(model: nn.Module) -> nn.Module:
    """Every expert layer of a model runs its own code again, in place; returns the model.

    Modules of transformers' experts interface get back the implementation that they had before `patch`, or
    transformers' default if the model was made with experts_implementation="moegemm".
    """
    modules: list[Any] = list(model.modules())
    for module in filter(is_dispatched, modules):
        before = vars(module).pop(_BEFORE, None)
        if before is None and module.config._experts_implementation == NAME:
            before = _before_of(module.config)
        if before is not None:
            module.config._experts_implementation_internal = before.implementation
    for module in modules:
        vars(module).pop(_REFUSAL, None)
        if is_dispatched(module) and module.config._experts_implementation == NAME:
            module.config._experts_implementation_internal = _default_implementation()
        elif isinstance(module, llama4.Llama4Block):
            llama4.leave(module)
        elif isinstance(module, own_modules.OwnExperts):
            own_modules.leave(module)
    return model
