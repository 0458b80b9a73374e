"""torchtitan's experts on moegemm: overrides that are named on its command line, for torchtitan 0.3.

    --override.imports moegemm.integrations.torchtitan.grouped_experts
    --override.imports moegemm.integrations.torchtitan.routed_experts

`grouped_experts` computes the rows that torchtitan's dispatcher has sorted. `routed_experts` replaces the dispatcher
too: tokens are read and rows are written where they lie, around one exchange. `gpt_oss_experts` is the first one for
gpt-oss, `selective_checkpointing` keeps our products. Parameters keep names, shapes and shardings, so that checkpoints
are stock.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torchtitan
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from moegemm.distributed import checkpoint_ops, expert_parallel_mlp
from moegemm.expert_layer.expert_major import experts_mlp
from moegemm.expert_layer.layer import moe_mlp

_VERSION = getattr(torchtitan, "__version__", "0.3")
if not _VERSION.startswith("0.3"):
    raise ImportError(f"moegemm.integrations.torchtitan is for torchtitan 0.3; this one is {_VERSION}")

_GPT_OSS_ALPHA = 1.702  # torchtitan has it as a default of its own activation


def local(parameter: Any) -> Any:
    """This rank's part, however torchtitan has sharded it."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


class MoegemmGroupedExperts(GroupedExperts):
    """torchtitan's experts, with gates and ups as the two parameters that they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w1, w2, w3 = (local(w).bfloat16() for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        rows = x_RD.bfloat16()  # as torchtitan's own products
        out = experts_mlp(rows, (w1, w3), w2, num_tokens_per_expert_E)
        return out.type_as(x_RD)


class MoegemmGptOssExperts(GptOssGroupedExperts):
    """Those of gpt-oss: gates and ups alternate, and both products have a bias."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        mesh: Any = getattr(self.mlp1_weight_EGD, "device_mesh", None)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        if "tp" in names and mesh.size(names.index("tp")) > 1:
            return super().forward(x_RD, num_tokens_per_expert_E)  # its bias is divided among the ranks
        first, first_bias, second, second_bias = (
            local(w).bfloat16()
            for w in (self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        )
        return experts_mlp(
            x_RD.bfloat16(), first, second, num_tokens_per_expert_E, activation="clamped_swiglu",
            layout="interleaved", gate_up_bias=first_bias, down_bias=second_bias, alpha=_GPT_OSS_ALPHA,
            limit=self.swiglu_limit,
        )  # fmt: skip


class MoegemmRoutedExperts(RoutedExperts):
    """Experts and exchange together. Other dispatchers than torchtitan's all-to-all, and experts that are not its plain
    ones, run torchtitan's own code."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def _whole_layer(self) -> bool:
        dispatcher, experts = self.token_dispatcher, self.inner_experts
        if type(experts) not in (GroupedExperts, MoegemmGroupedExperts):
            return False
        if type(dispatcher) is LocalTokenDispatcher:
            return True
        return type(dispatcher) is AllToAllTokenDispatcher and dispatcher.ep_mesh is not None

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        if not self._whole_layer():
            return super().forward(x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E)
        experts, dispatcher = self.inner_experts, self.token_dispatcher
        w1, w2, w3 = (local(w).bfloat16() for w in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
        arguments = (x_BLD.bfloat16(), (w1, w3), w2, topk_expert_ids_BLK, topk_scores_BLK)
        if type(dispatcher) is LocalTokenDispatcher:
            return moe_mlp(*arguments).type_as(x_BLD)
        return expert_parallel_mlp(*arguments, mesh=dispatcher.ep_mesh).type_as(x_BLD)


class MoegemmSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing, which keeps our products as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[torch._ops.OpOverload]:
        return super().get_save_ops() | checkpoint_ops("products")


@override(target=GroupedExperts.Config, exact=True, description="moegemm's grouped products in the experts.")
def grouped_experts(cfg: GroupedExperts.Config) -> GroupedExperts.Config:
    return derive(cfg, MoegemmGroupedExperts.Config)


@override(target=GptOssGroupedExperts.Config, exact=True, description="moegemm's grouped products in gpt-oss.")
def gpt_oss_experts(cfg: GptOssGroupedExperts.Config) -> GptOssGroupedExperts.Config:
    return derive(cfg, MoegemmGptOssExperts.Config)


@override(target=RoutedExperts.Config, exact=True, description="moegemm's layer and exchange without permutations.")
def routed_experts(cfg: RoutedExperts.Config) -> RoutedExperts.Config:
    return derive(cfg, MoegemmRoutedExperts.Config)


@override(target=SelectiveAC.Config, exact=True, description="Selective checkpointing that keeps moegemm's products.")
def selective_checkpointing(cfg: SelectiveAC.Config) -> SelectiveAC.Config:
    return derive(cfg, MoegemmSelectiveAC.Config)
