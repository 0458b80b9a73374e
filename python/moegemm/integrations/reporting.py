"""Which expert layers of a model run on moegemm, which do not, and why."""

import textwrap
from typing import Any, NamedTuple

from torch import nn

from moegemm.activations import Activation
from moegemm.integrations.expert_modules import llama4, own_modules
from moegemm.integrations.expert_modules.bitsandbytes import why_dequantised
from moegemm.integrations.expert_modules.experts import Stored, stored_in, why_not
from moegemm.integrations.expert_modules.forwards import OnMoegemm
from moegemm.integrations.expert_modules.gates import activation_of
from moegemm.integrations.expert_modules.packed_experts import WEIGHT_NAMES, is_dispatched, is_packed
from moegemm.integrations.patching import _REFUSAL, is_own_layer, separate_experts
from moegemm.integrations.peft_adapters import NAME
from moegemm.program.tables import html_table

_IN_TORCH = "in torch, between moegemm's products: no kernel has it"


class Layer(NamedTuple):
    """One expert layer."""

    name: str  # in the model
    kind: str  # the class of the module
    on_moegemm: bool
    reason: str  # why not; or what of it runs in torch, or ""


class Report(NamedTuple):
    """All expert layers of a model, in its order."""

    layers: tuple[Layer, ...]

    def __repr__(self) -> str:
        on = sum(layer.on_moegemm for layer in self.layers)
        lines = [f"{on} of {len(self.layers)} expert layers run on moegemm"]
        for layer in self.layers:
            where = "moegemm" if layer.on_moegemm else "own code"
            lines.append(f"  {layer.name or '(model)'} ({layer.kind}): {where}")
            lines += textwrap.wrap(layer.reason, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(n or "(model)", kind, "moegemm" if on else "own code", why) for n, kind, on, why in self.layers]
        return html_table(("layer", "kind", "runs on", "why"), rows)


def _of_products(module: Any, stored: Stored, activation: Activation | None, norm: bool) -> tuple[bool, str]:
    reason = why_not(stored, placed_later="_old_forward" in vars(module))
    if reason is not None:
        return False, reason
    if activation is None:
        return True, f"its activation runs {_IN_TORCH}"
    return True, f"its norm runs {_IN_TORCH}" if norm else ""


def _of_dispatched(module: Any) -> tuple[bool, str]:
    implementation = module.config._experts_implementation
    if implementation != NAME and not is_packed(module):
        return False, f"its config chooses the experts implementation {implementation!r}"
    activation = activation_of(module, getattr(module, "has_gate", True))
    on, reason = _of_products(module, stored_in(module), activation, getattr(module, "has_post_expert_norm", False))
    found = [why_dequantised(module, name) for name in WEIGHT_NAMES] if on else []
    decoded = [f"its weights are dequantised for every call: {why}" for why in found if why is not None][:1]
    return on, "; ".join(([reason] if reason else []) + decoded)


def _of_own_layer(module: Any) -> tuple[bool, str]:
    if not isinstance(module, OnMoegemm):
        return False, vars(module).get(_REFUSAL, "it is not patched; moegemm.patch(model) would try")
    if isinstance(module, llama4.Llama4Block):
        return _of_llama4(module)
    form: own_modules.Form = module._moegemm_form  # type: ignore[attr-defined]
    activation = own_modules.activation_in(module, form)
    return _of_products(module, own_modules.stored_as(module, form), activation, False)


def _of_llama4(block: Any) -> tuple[bool, str]:
    experts = llama4.innermost(block.experts)
    if not isinstance(experts, llama4.Llama4Experts):
        return False, f"its experts are a {type(experts).__name__}, not Llama 4's own"
    stored = own_modules.stored_as(experts, llama4.FORM)
    return _of_products(experts, stored, own_modules.activation_in(experts, llama4.FORM), False)


def report(model: nn.Module) -> Report:
    """Which expert layers of a model run on moegemm, which do not, and why. Print it, or read its `layers`.

    A layer is recognised by its parts, as by `patch`. No layer is run, and none is changed.
    """
    layers: list[Layer] = []
    parts: set[Any] = set()
    for name, module in model.named_modules():
        separate = separate_experts(module)
        if is_dispatched(module):
            parts.add(module)
            layers.append(Layer(name, type(module).__name__, *_of_dispatched(module)))
        elif is_own_layer(module, parts):
            layers.append(Layer(name, type(module).__name__, *_of_own_layer(module)))
        elif separate is not None:
            layers.append(Layer(name, type(module).__name__, False, separate))
    return Report(tuple(layers))
