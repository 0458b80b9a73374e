"""PEFT's adapters on expert parameters (`LoraConfig(target_parameters=...)`) as low-rank parts of the products.

PEFT's wrapper adds scaling * B A to the whole parameter while the experts run. Where the experts run on moegemm, it
leaves a note on the module instead, and the forward there reads the two factors. Everything else of the wrapper stays
PEFT's: which adapters are active, merged or switched off, their files, their hooks.
"""

import contextlib
import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moegemm.integrations.expert_modules.forwards import OnMoegemm
from moegemm.integrations.expert_modules.packed_experts import (
    WEIGHT_NAMES,
    KeepsPacked,
    is_dispatched,
    is_turned,
    packed_weight,
)
from moegemm.integrations.late_imports import when_imported
from moegemm.integrations.notices import say_once
from moegemm.lora.low_rank import LowRank
from moegemm.operators.packed import Packed

NAME = "moegemm"  # in transformers' experts interface
_MODULE = "peft.tuners.lora.layer"
_OWN_METHODS = ("get_delta_weight", "get_delta_factors", "forward", "get_param")


_ours = True  # else PEFT adds every adapter itself
_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # a lock for each module with notes


@contextlib.contextmanager
def left_to_peft() -> Iterator[None]:
    """Inside, PEFT adds every adapter itself, as it does without moegemm: for comparisons."""
    global _ours
    before, _ours = _ours, False
    try:
        yield
    finally:
        _ours = before


def _reads_notes(module: Any) -> bool:
    """Whether the forward of this very module, not of one inside it, is moegemm's."""
    if isinstance(module, OnMoegemm):
        return True
    dispatched = hasattr(type(module), "_apply_gate") and is_dispatched(module)
    return dispatched and getattr(module.config, "_experts_implementation", None) == NAME


def _why_not(wrapper: Any, names: list[str], wrapper_class: Any) -> str | None:
    """Why PEFT has to add these adapters itself, or None."""
    parameter, own = wrapper.parameter_name, type(wrapper)
    changed = [name for name in _OWN_METHODS if getattr(own, name, None) is not getattr(wrapper_class, name, None)]
    if changed:
        return f"{own.__name__} has a {changed[0]} of its own"
    if parameter not in WEIGHT_NAMES or wrapper.get_param().dim() != 3:
        return f"{parameter} is not the [E, ...] weights of a product"
    for name in names:
        variant = getattr(wrapper, "lora_variant", {}).get(name)
        if variant is not None:
            return f"adapter {name!r} is the variant {type(variant).__name__}"
        if getattr(wrapper, "use_dora", {}).get(name):
            return f"adapter {name!r} uses DoRA"
        if wrapper.lora_B[name].bias is not None or wrapper.lora_A[name].bias is not None:
            return f"adapter {name!r} has a bias"
        if not isinstance(wrapper.lora_dropout[name], torch.nn.Identity):
            return f"adapter {name!r} has a dropout, which no parameter can have"
        for linear in (wrapper.lora_A[name], wrapper.lora_B[name]):
            if type(linear) is not torch.nn.Linear or type(linear.weight) is not torch.nn.Parameter:
                return f"adapter {name!r} has a {type(linear).__name__} with a {type(linear.weight).__name__}"
    if wrapper.num_experts == 1 and not _swaps(wrapper):
        return "one expert's transposed weights are those of a plain linear layer to PEFT"
    return None


def _swaps(wrapper: Any) -> bool:
    """Whether PEFT took the last dimension of [E, N, K] for the input. Before 0.19 it takes the middle one, which
    of turned weights, as `get_param` shows them to it, is that same one."""
    return bool(getattr(wrapper, "_did_swap_in_out_features", is_turned(wrapper.get_base_layer())))


def note_turned_weights(model: Any, turned: Any) -> None:
    """Tells PEFT's wrappers of experts in `turned` that their weights are [E, N, K] now and were [E, K, N]."""
    layers: Any = sys.modules.get(_MODULE)
    for wrapper in model.modules() if hasattr(layers, "ParamWrapper") else ():
        if isinstance(wrapper, layers.ParamWrapper) and any(wrapper.get_base_layer() is module for module in turned):
            wrapper._did_swap_in_out_features = True


def _low_rank(wrapper: Any, name: str, transposed: bool, dtype: torch.dtype) -> LowRank:
    """The factors of one adapter; `transposed` is how the experts read their weights, `dtype` that of the products."""
    experts = wrapper.num_experts
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight  # [E r, in], [out, r E]
    a = a.reshape(experts, -1, a.size(-1))
    b = b.reshape(b.size(0), -1, experts).permute(2, 0, 1)
    if _swaps(wrapper) == transposed:  # PEFT took the other dimension for the input
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if a.dtype != torch.float32:
        a, b = a.to(dtype), b.to(dtype)
    return LowRank(a, b, wrapper.scaling[name])


def adapters_of(module: Any, parameter: str, transposed: bool, dtype: torch.dtype) -> tuple[LowRank, ...]:
    """The adapters that are active on a parameter while the forward of this module runs, for products in this dtype."""
    notes = getattr(module, "_moegemm_adapters", ())
    return tuple(
        _low_rank(wrapper, name, transposed, dtype)
        for wrapper, names in notes
        if wrapper.parameter_name == parameter
        for name in names
    )


@contextlib.contextmanager
def _noted(module: Any, wrapper: Any, names: list[str]) -> Iterator[None]:
    """Inside, the forward of the module finds these adapters. Other threads wait, or they would find them as well."""
    turn = None if torch.compiler.is_compiling() else _turns.setdefault(module, threading.RLock())
    if turn is not None:
        turn.acquire()
    before = getattr(module, "_moegemm_adapters", ())
    module._moegemm_adapters = (*before, (wrapper, tuple(names)))
    try:
        yield
    finally:
        module._moegemm_adapters = before
        if turn is not None:
            turn.release()


@contextlib.contextmanager
def added_by_peft(module: Any) -> Iterator[None]:
    """Inside, the module's parameters have their adapters added, as its own code needs them."""
    with contextlib.ExitStack() as stack:
        for wrapper, names in getattr(module, "_moegemm_adapters", ()):
            stack.enter_context(type(wrapper)._activate_lora.peft_own(wrapper, names))
        yield


def _packed_below(wrapper: Any) -> Packed | None:
    """The packed weight that a wrapper of PEFT is around, None where it is plain."""
    name = wrapper.parameter_name
    return packed_weight(wrapper.get_base_layer(), name) if name in WEIGHT_NAMES else None


def _refuse_to_merge(layer: Any) -> None:
    """Refuses a layer of PEFT beside packed weights."""
    name = getattr(layer, "parameter_name", None)
    if name is None:
        name, word = "weight", "fp8" if isinstance(layer.get_base_layer(), KeepsPacked) else None
    else:
        packed = _packed_below(layer)
        word = None if packed is None else packed.word
    if word is not None:
        raise NotImplementedError(
            f"{name} is in {word}, which cannot have an adapter merged into it; keep the adapter beside it, or load "
            "the weights dequantised"
        )


def _check_before_merging() -> None:
    """Makes PEFT refuse before the first of a model's adapters is merged."""
    tuners: Any = importlib.import_module("peft.tuners.tuners_utils")
    check: Callable[..., None] = tuners.BaseTuner._check_merge_allowed

    def check_merge_allowed(self: Any) -> None:
        check(self)
        for layer in self.model.modules():
            if isinstance(layer, tuners.BaseTunerLayer):
                _refuse_to_merge(layer)

    tuners.BaseTuner._check_merge_allowed = check_merge_allowed


def _follow(layers: Any) -> None:
    """Makes PEFT's wrapper leave a note where the experts below it read one."""
    wrapper_class = getattr(layers, "ParamWrapper", None)  # a release before it has no parameters to target
    if wrapper_class is None or hasattr(wrapper_class._activate_lora, "peft_own"):
        return
    add: Callable[..., Any] = wrapper_class._activate_lora
    get: Callable[..., Any] = wrapper_class.get_param

    never_swaps = "_did_swap_in_out_features" not in wrapper_class.update_layer.__code__.co_names

    def get_param(self: Any) -> Any:
        """PEFT asks for shape, dtype and device: those of the weight that packed values stand for."""
        packed = _packed_below(self)
        if packed is None:
            return get(self)
        weight = packed.values.new_empty((), dtype=packed.dtype).expand(packed.shape)  # of no memory
        return weight.mT if never_swaps and is_turned(self.get_base_layer()) else weight

    merge: Callable[..., Any] = wrapper_class.merge

    def merge_if_plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_to_merge(self)
        return merge(self, *args, **kwargs)

    @contextlib.contextmanager
    def activate(self: Any, active_adapters: list[str]) -> Iterator[None]:
        module, names = self.get_base_layer(), [name for name in active_adapters if name in self.lora_A]
        reason = None
        if names and _ours and _reads_notes(module):
            reason = _why_not(self, names, wrapper_class)
            if reason is None:
                with _noted(module, self, names):
                    yield
                return
            kind = type(module).__name__.removeprefix("Parametrized")  # by PEFT, for another parameter
            if _packed_below(self) is not None:
                raise NotImplementedError(
                    f"PEFT cannot add its adapters to the quantised {self.parameter_name} of {kind}, and moegemm does "
                    f"not take them: {reason}"
                )
            say_once(f"PEFT adds its adapters to the weights of {kind} itself: {reason}")
        with add(self, active_adapters):
            yield

    activate.peft_own = add  # type: ignore[attr-defined]
    wrapper_class._activate_lora = activate
    wrapper_class.get_param = get_param
    wrapper_class.merge = merge_if_plain
    _check_before_merging()


def follow_peft() -> None:
    """From now on PEFT's adapters on experts of moegemm run as parts of their products, whenever PEFT is imported."""
    when_imported(_MODULE, _follow)
