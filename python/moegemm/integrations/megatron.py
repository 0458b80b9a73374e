"""Megatron-Core's experts on moegemm, for megatron-core 0.16: `MoESubmodules(experts=ModuleSpec(MoegemmExperts, ...))`.

The module is Megatron's SequentialMLP: parameters, names and checkpoints (`sharded_state_dict`) are that one's. The
weights of all experts lie in one tensor, of which each expert's parameter is a view, and a forward runs all of them in
two products, with the probabilities between them.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Parameter

from moegemm.expert_layer.expert_major import experts_mlp
from moegemm.integrations.notices import say_once
from moegemm.operators.gradients.weight_gradients import WeightGradients

_GATED = {F.silu: "swiglu", F.gelu: "geglu"}
_PLAIN = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}


class _Stacked(torch.autograd.Function):
    """The parameters of all experts as the tensor that they are views of; its gradient is theirs, one after another."""

    @staticmethod
    def forward(ctx: Any, stack: Tensor, *parameters: Tensor) -> Tensor:
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *gradients[0].unbind(0)


def share_memory(parameters: list[Parameter]) -> Tensor:
    """Moves parameters of one shape into one tensor [E, ...] and returns it."""
    stack = torch.stack([p.detach() for p in parameters])
    for parameter, part in zip(parameters, stack.unbind(0), strict=True):
        parameter.data = part
    return stack


def stacked(stack: Tensor, parameters: list[Parameter]) -> Tensor:
    """That tensor, differentiable in the parameters. Where somebody has moved those, what they hold now, copied."""
    step = stack.stride(0) * stack.element_size()
    in_place = all(p.data_ptr() == stack.data_ptr() + i * step for i, p in enumerate(parameters))
    if in_place and parameters[0].dtype == stack.dtype:
        result: Tensor = _Stacked.apply(stack, *parameters)  # type: ignore[no-untyped-call]
        return result
    say_once("Megatron's expert weights were moved apart after they were made: they are copied in every forward")
    return torch.stack(list(parameters))


def _activation_of(config: Any) -> dict[str, Any]:
    """The arguments of `experts_mlp` that say what lies between the products."""
    table = _GATED if config.gated_linear_unit else _PLAIN
    if config.activation_func not in table:
        raise ValueError(f"activation_func is {config.activation_func}; accepted are {[f.__name__ for f in table]}")
    limit = getattr(config, "activation_func_clamp_value", None)
    up_offset = getattr(config, "glu_linear_offset", 0.0)
    if not config.gated_linear_unit and (limit is not None or up_offset):
        raise ValueError(
            f"activation_func_clamp_value is {limit} and glu_linear_offset is {up_offset}; without gated_linear_unit "
            "they must be None and 0"
        )
    if up_offset and config.activation_func is not F.silu:
        raise ValueError(f"glu_linear_offset is {up_offset} with {config.activation_func.__name__}; only silu takes it")
    numbers = {"limit": limit, "up_offset": up_offset or None}  # None is what the activation has itself: none
    return {"activation": table[config.activation_func], **numbers}


class MoegemmExperts(SequentialMLP):
    """Experts of one rank for Megatron's MoELayer."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection)
        self._activation = _activation_of(config)
        if pg_collection.expt_tp.size() > 1:
            raise ValueError("experts are split over tensor-parallel ranks; expert_tensor_parallel_size must be 1")
        if config.fp8 or getattr(config, "fp4", None):
            raise ValueError("fp8 and fp4 products are not computed here; config.fp8 and config.fp4 must be None")
        self._stacks = [share_memory(self._parameters_of(layer)) for layer in ("linear_fc1", "linear_fc2")]
        self.later = WeightGradients() if getattr(config, "delay_wgrad_compute", False) else None

    def _parameters_of(self, layer: str, name: str = "weight") -> list[Parameter]:
        return [getattr(getattr(expert, layer), name) for expert in self.local_experts]

    def _bias(self, layer: str) -> Tensor | None:
        found = self._parameters_of(layer, "bias")
        return None if found[0] is None else torch.stack([*found])

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Rows [R, H] sorted by expert, their counts [E] and probabilities [R] -> [R, H], and no bias left to add."""
        rows, probabilities = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            rows = (probabilities.unsqueeze(-1) * rows).to(rows.dtype)
            probabilities = torch.ones_like(probabilities)
        first, second = (
            stacked(stack, self._parameters_of(layer))
            for stack, layer in zip(self._stacks, ("linear_fc1", "linear_fc2"), strict=True)
        )
        out = experts_mlp(
            rows, first, second, tokens_per_expert.to(rows.device, non_blocking=True), row_weights=probabilities,
            gate_up_bias=self._bias("linear_fc1"), down_bias=self._bias("linear_fc2"),
            weight_gradients=self.later if torch.is_grad_enabled() else None, **self._activation,
        )  # fmt: skip
        return out, None

    def backward_dw(self) -> None:
        """Computes the weight gradients that the backward left, with config.delay_wgrad_compute."""
        if self.later is not None:
            self.later.run()
