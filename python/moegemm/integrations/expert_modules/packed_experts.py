"""Experts modules whose weights are quantised: where the packed values and their scales are kept, and the way to them.

The parameter of a weight (`gate_up_proj`, `up_proj`, `down_proj`) holds the packed values under the weight's own name,
so that whoever looks for it finds it: PEFT's target_parameters, parallel plans, reports. Its scales are beside it:
`gate_up_proj_scales` where moegemm packed the module, `gate_up_proj_scale_inv` in transformers' own fp8 experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from moegemm.formats import FORMATS
from moegemm.integrations.expert_modules.bitsandbytes import in_four_bits, packed_nf4, why_dequantised
from moegemm.integrations.expert_modules.forwards import Changed, OnMoegemm, give_forward
from moegemm.operators.packed import REFUSED_GRADIENT, Packed
from moegemm.quantized.rounding import quantize
from moegemm.quantized.weight import FP8_BLOCK, MX_GROUP, e8m0_as_bytes

WEIGHT_NAMES = ("gate_up_proj", "up_proj", "down_proj")
_WORDS = "_moegemm_words"  # on a module that moegemm packed: how to read each of its weights, the dtype of its scales
_TURNED = "_moegemm_turned"  # on one whose weights are [E, K, N] where they are not packed


def is_packed_parameter(name: str, parameter: Tensor) -> bool:
    """Whether a parameter of a module with packed weights is values or scales of them."""
    return parameter.element_size() == 1 or name.endswith(("_scale_inv", "_scales"))


class KeepsPacked(Changed):
    """A change of dtype (`.half()`, `.to(torch.bfloat16)`) leaves packed values and their scales alone: it would make
    weights of the values without their scales."""

    def _apply(self: Any, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = [p for name, p in self._parameters.items() if p is not None and is_packed_parameter(name, p)]

        def of_dtype(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            if made.dtype == tensor.dtype or not any(tensor is parameter for parameter in own):
                return made
            return tensor.to(made.device)

        return super()._apply(of_dtype, recurse)  # type: ignore[misc]

    def _load_from_state_dict(
        self: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Values and scales of another dtype mean other weights: torch would convert them without a word."""
        for name, own in self._parameters.items():
            given = state_dict.get(prefix + name)
            if own is None or not isinstance(given, Tensor) or not is_packed_parameter(name, own):
                continue
            widened = {given.dtype, own.dtype} <= set(FORMATS) and given.dtype.itemsize < own.dtype.itemsize
            if given.dtype != own.dtype and not widened:
                error_msgs.append(
                    f"{prefix}{name} has dtype {given.dtype}; {own.dtype} is accepted, as the packed weight has it"
                )
                return
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class PackedExperts(KeepsPacked, OnMoegemm):
    """The forward of a module that moegemm packed: its own code cannot read the weights any more."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        from moegemm.integrations.expert_modules.experts import experts_forward  # it reads weights through this file

        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class QuantisedHere(PackedExperts):
    """One that quantize_experts packed: no checkpoint has it so, and transformers cannot save it."""

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        from moegemm.integrations.saving import follow_saving  # which looks for this class

        follow_saving()
        super().__setstate__(state)  # type: ignore[misc]


def keep_packed(
    module: Any, weights: dict[str, tuple[Tensor, Tensor, str]], forward_class: type[PackedExperts] = PackedExperts
) -> None:
    """Puts packed values, scales and words in the places of an experts module's weights [E, N, K]."""
    for name, (values, scales, _) in weights.items():
        delattr(module, name)
        module.register_parameter(name, nn.Parameter(values, requires_grad=False))
        module.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))
    setattr(module, _WORDS, {name: (word, scales.dtype) for name, (_, scales, word) in weights.items()})
    setattr(module, _TURNED, getattr(module, "is_transposed", False))
    module.is_transposed = False
    give_forward(module, forward_class)


def expect_mxfp4(module: Any) -> None:
    """Makes an experts module of gpt-oss, still without memory, one whose weights are packed."""
    with torch.device("meta"):
        packed = {}
        for name in ("gate_up_proj", "down_proj"):
            experts, k, n = getattr(module, name).shape  # as bf16 models keep them
            scales = torch.empty((experts, n, k // MX_GROUP), dtype=torch.uint8)
            packed[name] = torch.empty((*scales.shape, MX_GROUP // 2), dtype=torch.uint8), scales, "mxfp4"
    keep_packed(module, packed)
    for name, parameter in module.named_parameters():
        # transformers would draw random numbers for those that stay on disk, and bytes take none.
        parameter._is_hf_initialized = is_packed_parameter(name, parameter)


def _fp8_scales(name: str, module: Any, values: Tensor, scales: Tensor) -> tuple[Tensor, str]:
    """The scales of transformers' FP8Experts as the products take them and how they are meant, or ValueError."""
    experts, n, k = values.shape
    if scales.numel() == experts:
        return scales.reshape(-1), "fp8/tensor"
    if tuple(scales.shape) == (experts, n, 1):
        return scales.squeeze(2), "fp8/channel"
    block = getattr(module, "block_size", None)
    one_each = block is None or (tuple(block) == FP8_BLOCK and n <= block[0] and k <= block[1])
    if name == "gate_up_proj" and one_each and tuple(scales.shape) == (experts, 2, 1):  # one for gates, one for ups
        return scales.squeeze(2).repeat_interleave(n // 2, 1), "fp8/channel"
    if block is None or tuple(block) != FP8_BLOCK:
        raise ValueError(f"{name} has scales of blocks {block}; {FP8_BLOCK} is accepted")
    # A gate and an up whose last blocks are partial: the ups' blocks do not begin at a multiple of 128 rows.
    apart = name == "gate_up_proj" and (n // 2) % block[0] != 0 and n > block[0]
    if apart or tuple(scales.shape) != (experts, -(-n // block[0]), -(-k // block[1])):
        raise ValueError(
            f"{name} is {list(values.shape)} with scales {list(scales.shape)}; its blocks do not fit 128 x 128"
        )
    return scales, f"fp8/{block[0]}x{block[1]}"


def _dtype_of(module: Any) -> torch.dtype:
    """That of the activations, as far as a module tells before it has seen any."""
    for name in ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias"):
        bias = getattr(module, name, None)
        if isinstance(bias, Tensor) and bias.dtype in FORMATS:
            return bias.dtype
    dtype = getattr(getattr(module, "config", None), "dtype", None)
    return dtype if dtype in FORMATS else torch.bfloat16


def require_packed(module: Any, name: str, values: Tensor, scales: Tensor) -> None:
    """Refuses weights that were cast without their scales, and a gradient of them."""
    if values.is_floating_point() and values.element_size() > 1:
        raise TypeError(
            f"{name} of {type(module).__name__} has dtype {values.dtype} beside scales; values of 8 bits are accepted: "
            "a cast leaves the scales out. Load the checkpoint again"
        )
    if torch.is_grad_enabled() and (values.requires_grad or scales.requires_grad):
        raise TypeError(f"{name} of {type(module).__name__} or its scales require a gradient; {REFUSED_GRADIENT}")


def require_packed_experts(module: Any) -> None:
    """The same of each weight that has scales beside it."""
    for name in WEIGHT_NAMES:
        values = module._parameters.get(name)
        if values is None:
            continue
        for suffix in ("_scales", "_scale_inv"):
            scales = module._parameters.get(name + suffix)
            if scales is not None:
                require_packed(module, name, values, scales)


def packed_weight(module: Any, name: str) -> Packed | None:
    """The quantised weight of this name, None for one that is not quantised; ValueError says why one cannot be read."""
    parametrized = in_four_bits(module, name)
    if parametrized is not None:  # asking the module for the weight would dequantise it
        return packed_nf4(*parametrized) if why_dequantised(module, name) is None else None
    values = getattr(module, name, None)
    if not isinstance(values, Tensor):
        return None
    known = getattr(module, _WORDS, {}).get(name)
    if known is not None:
        word, scale_dtype = known
        # PEFT's prepare_model_for_kbit_training widens whatever has 16 bits.
        scales = getattr(module, f"{name}_scales").to(scale_dtype)
        values = values.flatten(2) if values.dim() == 4 else values  # mxfp4 as checkpoints have it
        return Packed(values, scales, word, _dtype_of(module))
    scales = getattr(module, f"{name}_scale_inv", None)
    if not isinstance(scales, Tensor) or values.dim() != 3:
        return None
    if values.element_size() > 1:
        raise ValueError(f"{name} has dtype {values.dtype} beside scales; values of 8 bits are accepted")
    as_bytes = e8m0_as_bytes(scales)
    if values.dtype == torch.int8:  # e2m1 with a scale for each 32 columns
        if as_bytes.dtype != torch.uint8:
            raise ValueError(
                f"{name}_scale_inv of fp4 values has dtype {scales.dtype}; torch.float8_e8m0fnu is accepted"
            )
        return Packed(values.view(torch.uint8), as_bytes, "mxfp4", _dtype_of(module))
    return Packed(values, *_fp8_scales(name, module, values, as_bytes), _dtype_of(module))


def is_packed(module: Any) -> bool:
    """Whether moegemm packed it."""
    return hasattr(module, _WORDS)


def is_turned(module: Any) -> bool:
    """Whether its packed weights [E, N, K] stand for weights [E, K, N]."""
    return bool(getattr(module, _TURNED, False))


def quantize_experts(model: nn.Module, format: str, **options: Any) -> nn.Module:
    """Quantises the experts of every layer of transformers' experts interface in place, and returns the model.

    format and options are those of moegemm.quantize. The weights become frozen, run on moegemm whatever the config
    says, and keep their names: PEFT's adapters find them. Layer by layer: no second copy of the model is needed.
    transformers' save_pretrained refuses the model from then on.
    """
    # Which read weights through this file.
    from moegemm.integrations.peft_adapters import follow_peft, note_turned_weights
    from moegemm.integrations.saving import follow_saving

    follow_peft()
    follow_saving()
    found = [(name, module) for name, module in model.named_modules() if is_dispatched(module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no expert layer of transformers' experts interface")
    for name, module in found:
        if any(in_four_bits(module, w) or packed_weight(module, w) is not None for w in WEIGHT_NAMES):
            raise ValueError(f"{name} is quantised already; its weights are packed")
        if parametrize.is_parametrized(module):
            raise ValueError(f"{name} has parametrized weights, which cannot be replaced; quantise it before that")
    turned = [module for _, module in found if getattr(module, "is_transposed", False)]
    for _, module in found:
        transposed, packed = getattr(module, "is_transposed", False), {}
        for name in WEIGHT_NAMES:
            w = getattr(module, name, None)
            if isinstance(w, Tensor):
                made = quantize(
                    w.detach().transpose(1, 2).contiguous() if transposed else w.detach(), format, **options
                )
                packed[name] = made.values.data, made.scales.data, made.word
        keep_packed(module, packed, QuantisedHere)
    note_turned_weights(model, turned)
    return model


def is_dispatched(module: Any) -> bool:
    """Whether transformers asks its experts interface in this module's forward."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate") and hasattr(module, "config")
