"""Matrix products of Mixture-of-Experts layers, forward and backward, with the token permutation inside.

>>> import torch, moegemm
>>> tokens, experts = torch.randn(6, 16), torch.randn(4, 32, 16)      # [T, K], [E, N, K]
>>> weights, ids = torch.randn(6, 4).softmax(-1).topk(2)              # [T, topk]
>>> m_sizes, gather_indices = moegemm.route(ids, 4)
>>> moegemm.grouped_gemm(tokens, experts, m_sizes, 2, gather_indices, permute_x=True).shape
torch.Size([12, 32])

A call that breaks a rule raises ValueError, TypeError or NotImplementedError before anything is run. The message names
the argument, its value and what is accepted.
"""

from typing import TYPE_CHECKING

from torch.nn import Module as _Module

from moegemm.autograd import GroupedGemm
from moegemm.expert_layer.expert_major import experts_mlp
from moegemm.expert_layer.layer import moe_mlp
from moegemm.interface import grouped_gemm, grouped_gemm_dW, grouped_gemm_dX, grouped_gemm_forward
from moegemm.lora import LoraAdapter, LowRank, keep_factors, lora_moe_mlp
from moegemm.operators.gradients.weight_gradients import WeightGradients
from moegemm.operators.process.early_loading import load_kernels
from moegemm.operators.process.information import info
from moegemm.operators.process.settings import (
    batch_invariant,
    max_multiprocessors,
    set_batch_invariant,
    set_max_multiprocessors,
)
from moegemm.program.plans import plan
from moegemm.quantized import QuantizedWeight, quantize
from moegemm.routing import combine, route
from moegemm.tuning import KernelConfigBackward_dW, KernelConfigBackward_dX, KernelConfigForward
from moegemm.tuning.measure import tune, tuning_cache

if TYPE_CHECKING:
    from moegemm.integrations.reporting import Report as _Report

__version__ = "0.1.0"


def patch(model: _Module) -> _Module:
    """Makes every expert layer of a model run on moegemm, in place, and returns the model.

    A layer is recognised by its parts: one of transformers' experts interface, a Llama 4 block, or a module with
    three-dimensional gate_up_proj and down_proj. A layer that cannot run on moegemm keeps its own code, with a warning
    that says why; ValueError where none can. `report` lists every layer, `unpatch` undoes it.
    """
    from moegemm.integrations.patching import patch as patch_model  # imported only by those who use it

    return patch_model(model)


def unpatch(model: _Module) -> _Module:
    """Undoes `patch`, or experts_implementation="moegemm", in place, and returns the model: its expert layers run what
    they ran before, or transformers' default."""
    from moegemm.integrations.patching import unpatch as unpatch_model

    return unpatch_model(model)


def quantize_experts(model: _Module, format: str, **options: object) -> _Module:
    """Quantises the experts of every layer of transformers' experts interface in place, and returns the model.

    format and options are those of `quantize`. The weights become frozen and keep their names, so that PEFT's adapters
    find them; no second copy of the model is needed. ValueError for a model without such layers or with experts that
    are quantised already. transformers' save_pretrained refuses the model from then on.
    """
    from moegemm.integrations.expert_modules.packed_experts import quantize_experts as quantize_in_place

    return quantize_in_place(model, format, **options)


def report(model: _Module) -> "_Report":
    """Which expert layers of a model run on moegemm, which do not, and why. Print it, or read its `layers`: each has
    name, kind, on_moegemm and reason. No layer is run, and none is changed."""
    from moegemm.integrations.reporting import report as report_on

    return report_on(model)


__all__ = [
    "GroupedGemm",
    "KernelConfigBackward_dW",
    "KernelConfigBackward_dX",
    "KernelConfigForward",
    "LoraAdapter",
    "LowRank",
    "QuantizedWeight",
    "WeightGradients",
    "batch_invariant",
    "combine",
    "experts_mlp",
    "grouped_gemm",
    "grouped_gemm_dW",
    "grouped_gemm_dX",
    "grouped_gemm_forward",
    "info",
    "keep_factors",
    "load_kernels",
    "lora_moe_mlp",
    "max_multiprocessors",
    "moe_mlp",
    "patch",
    "plan",
    "quantize",
    "quantize_experts",
    "report",
    "route",
    "set_batch_invariant",
    "set_max_multiprocessors",
    "tune",
    "tuning_cache",
    "unpatch",
]
