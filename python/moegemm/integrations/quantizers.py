"""transformers' quantizers for checkpoints whose experts stay packed and run on moegemm.

With experts_implementation="moegemm" a checkpoint in MXFP4 (gpt-oss) or fp8 (`*-FP8`) is loaded as it is: its experts
are never dequantised, and the quantizer says that adapters can be trained beside them. Any other implementation gets
what transformers does by itself. The classes are derived from transformers' own and stand in its table in their places.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from moegemm.formats import FORMATS
from moegemm.integrations.expert_modules.forwards import OnMoegemm, give_forward
from moegemm.integrations.expert_modules.packed_experts import (
    KeepsPacked,
    expect_mxfp4,
    is_packed_parameter,
    require_packed,
)
from moegemm.integrations.late_imports import when_imported
from moegemm.integrations.notices import say_once
from moegemm.integrations.peft_adapters import NAME
from moegemm.interface import grouped_gemm
from moegemm.operators.packed import Packed
from moegemm.quantized.weight import FP8_BLOCK, e8m0_as_bytes, is_fp8_block

_TABLE = "transformers.quantizers.auto"
_FP8 = "transformers.integrations.finegrained_fp8"


def _asks_for_moegemm(model: Any) -> bool:
    config = model.config.get_text_config()
    return NAME in (getattr(model.config, "_experts_implementation", None), config._experts_implementation)


def _readable(block: Any) -> bool:
    """Whether fp8 with scales of these blocks, None for one scale per tensor, is read packed."""
    return block is None or is_fp8_block(block)


class _KeepsPacked:
    """Before a quantizer of transformers in the order of classes. What that does for others is asked for once the model
    is there, whose config says who runs the experts."""

    _packed = False
    _environment: Any = ((), {})

    def validate_environment(self: Any, *args: Any, **kwargs: Any) -> None:
        self._environment = args, kwargs

    def _process_model_before_weight_loading(self: Any, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        asked = self.pre_quantized and not config.dequantize and _asks_for_moegemm(model)
        unread = self._unread_part(model) if asked else None
        if not asked or unread is not None:
            args, environment = self._environment
            super().validate_environment(*args, **environment)  # type: ignore[misc]
        self._packed = asked and not config.dequantize
        if self._packed:
            return self._prepare(model, **kwargs)
        if unread is not None:
            say_once(f"transformers dequantises the checkpoint on this machine: moegemm does not read {unread}")
        return super()._process_model_before_weight_loading(model, **kwargs)  # type: ignore[misc]

    def _unread_part(self: Any, model: Any) -> str | None:
        """What of the checkpoint moegemm does not read, or None."""
        return None

    @property
    def is_trainable(self: Any) -> bool:
        """Adapters beside frozen experts are."""
        return True if self._packed else super().is_trainable  # type: ignore[misc]

    @property
    def is_compileable(self: Any) -> bool:
        return True if self._packed else super().is_compileable  # type: ignore[misc]


class _Mxfp4(_KeepsPacked):
    """The checkpoint's `gate_up_proj_blocks` becomes the module's `gate_up_proj`; its scales keep their name."""

    def _prepare(self: Any, model: Any, **kwargs: Any) -> None:
        keep = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        names: Any = importlib.import_module("transformers.quantizers.quantizers_utils")
        gpt_oss: Any = importlib.import_module("transformers.models.gpt_oss.modeling_gpt_oss")
        for name, module in list(model.named_modules()):
            if isinstance(module, gpt_oss.GptOssExperts) and names.should_convert_module(name, keep):
                expect_mxfp4(module)

    def get_weight_conversions(self: Any) -> Any:
        if not self._packed:
            return super().get_weight_conversions()  # type: ignore[misc]
        loading: Any = importlib.import_module("transformers.core_model_loading")
        return [
            # When it saves, transformers reads the target as a pattern: that of the bias is another parameter.
            loading.WeightRenaming(source_patterns=f"{name}_blocks", target_patterns=rf"{name}(?!_)")
            for name in ("gate_up_proj", "down_proj")
        ]

    def get_state_dict_and_metadata(self: Any, model: Any) -> Any:
        return (None, {}) if self._packed else super().get_state_dict_and_metadata(model)  # type: ignore[misc]

    def param_needs_quantization(self: Any, model: Any, param_name: str, **kwargs: Any) -> bool:
        return not self._packed and super().param_needs_quantization(model, param_name, **kwargs)  # type: ignore[misc]

    def _process_model_after_weight_loading(self: Any, model: Any, **kwargs: Any) -> Any:
        return model if self._packed else super()._process_model_after_weight_loading(model, **kwargs)  # type: ignore[misc]


class PackedLinear(KeepsPacked, OnMoegemm):
    """An fp8 linear layer as one expert: its weight is read as it is, activations keep their dtype, and the input has a
    gradient. transformers' own quantises activations and needs a kernel of the hub."""

    compute_dtype = torch.bfloat16  # PEFT casts adapters to it; without it, to the dtype of the weight

    def forward(self: Any, input: Tensor) -> Tensor:
        require_packed(self, "weight", self.weight, self.weight_scale_inv)
        values, scales = self.weight.detach(), e8m0_as_bytes(self.weight_scale_inv.detach())
        dtype = input.dtype
        x = input.reshape(-1, input.size(-1))
        x = x if dtype in FORMATS else x.float()
        if self.block_size is None:
            w = Packed(values.unsqueeze(0), scales.reshape(1), "fp8/tensor")
        else:
            w = Packed(values.unsqueeze(0), scales.unsqueeze(0), f"fp8/{FP8_BLOCK[0]}x{FP8_BLOCK[1]}")
        rows = torch.full((1,), x.size(0), dtype=torch.int32, device=x.device)
        out = grouped_gemm(x, w, rows, 1).view(*input.shape[:-1], values.size(0)).to(dtype)  # type: ignore[arg-type]
        return out if self.bias is None else out + self.bias


class _Fp8(_KeepsPacked):
    """transformers' FP8Experts, which ask its table of functions, and its FP8Linear with a forward of ours. Neither is
    cast with the rest of a model."""

    def _unread_part(self: Any, model: Any) -> str | None:
        config = self.quantization_config
        block = config.weight_block_size
        if not _readable(block):
            return f"fp8 with blocks {tuple(block)}; {FP8_BLOCK} and one scale per tensor are accepted"
        keep = self.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
        names: Any = importlib.import_module("transformers.quantizers.quantizers_utils")
        for name, module in model.named_modules():
            kind = type(module).__name__
            if "GroupedLinear" in kind and names.should_convert_module(name, keep):
                return f"{name}, a {kind}"
        return None

    def _prepare(self: Any, model: Any, **kwargs: Any) -> None:
        super(_KeepsPacked, self)._process_model_before_weight_loading(model, **kwargs)  # type: ignore[misc]
        fp8: Any = importlib.import_module(_FP8)
        dtype = model.config.dtype
        for module in model.modules():
            if type(module) is fp8.FP8Linear and _readable(module.block_size):
                give_forward(module, PackedLinear)
                if dtype in FORMATS:
                    module.compute_dtype = dtype
            elif isinstance(module, fp8.FP8Experts):
                give_forward(module, KeepsPacked)

    def _process_model_after_weight_loading(self: Any, model: Any, **kwargs: Any) -> Any:
        model = super()._process_model_after_weight_loading(model, **kwargs) or model  # type: ignore[misc]
        if self._packed:
            for module in model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    if is_packed_parameter(name, parameter):
                        parameter.requires_grad_(False)
        return model


_METHODS = {"mxfp4": (_Mxfp4, "Mxfp4Quantizer"), "fp8": (_Fp8, "Fp8Quantizer"), "mxfp8": (_Fp8, "Fp8Quantizer")}
_made: dict[str, Any] = {}


def __getattr__(name: str) -> Any:
    """The classes, for pickles that name them."""
    if name not in _made and name in {known for _, known in _METHODS.values()}:
        importlib.import_module(_TABLE)
    if name not in _made:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made[name]


def _follow(auto: Any) -> None:
    """Puts our classes into transformers' table."""
    table = auto.AUTO_QUANTIZER_MAPPING
    for method, (kind, name) in _METHODS.items():
        own = table.get(method)
        if own is None or issubclass(own, _KeepsPacked):
            continue
        if name not in _made:
            _made[name] = type(name, (kind, own), {"__module__": __name__, "__doc__": own.__doc__})
        table[method] = _made[name]


def _teach_fp8_experts(fp8: Any) -> None:
    from moegemm.integrations.expert_modules.experts import experts_forward

    interface = getattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS", None)
    if interface is not None and NAME not in interface:
        interface.register(NAME, experts_forward)


def follow_quantizers() -> None:
    """From now on checkpoints that are loaded for moegemm keep their experts packed."""
    when_imported(_TABLE, _follow)
    when_imported(_FP8, _teach_fp8_experts)
