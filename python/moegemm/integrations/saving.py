"""transformers' save_pretrained of a model whose experts moegemm.quantize_experts packed: refused, with what to do.

It would write packed values under the names of plain weights and a config that does not say so. Loaded again, the
values would be taken for weights.
"""

import functools
from typing import Any

from moegemm.integrations.expert_modules.packed_experts import QuantisedHere
from moegemm.integrations.late_imports import when_imported

_MODULE = "transformers.modeling_utils"


def _require_no_packed_experts(model: Any) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):  # then adapters are saved, and nothing else
        return
    for name, module in model.named_modules():
        if isinstance(module, QuantisedHere):
            raise ValueError(
                f"save_pretrained of {type(model).__name__}, whose {name} moegemm.quantize_experts has quantised: no "
                "checkpoint of transformers holds it. Save the model before it is quantised and quantise it again "
                "after loading, save adapters alone (PeftModel.save_pretrained), or the whole model with torch.save"
            )


def _follow(modeling: Any) -> None:
    model_class = modeling.PreTrainedModel
    own = model_class.save_pretrained
    if hasattr(own, "moegemm_refuses"):
        return

    @functools.wraps(own)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        _require_no_packed_experts(self)
        return own(self, *args, **kwargs)

    save_pretrained.moegemm_refuses = True  # type: ignore[attr-defined]
    model_class.save_pretrained = save_pretrained


def follow_saving() -> None:
    """From now on a model with experts that were quantised in memory is not saved as one with plain weights."""
    when_imported(_MODULE, _follow)
