"""Expert layers whose experts are spread over ranks, on torch.distributed. Imported only by those who use it."""

from moegemm.distributed.all_to_all import AllToAll
from moegemm.distributed.checkpointing import checkpoint_ops
from moegemm.distributed.clipping import clip_grad_norm_
from moegemm.distributed.deep_ep import DeepEP
from moegemm.distributed.dispatcher import Dispatched, Dispatcher
from moegemm.distributed.layer import expert_parallel_mlp
from moegemm.distributed.sharding import shard_experts

__all__ = [
    "AllToAll",
    "DeepEP",
    "Dispatched",
    "Dispatcher",
    "checkpoint_ops",
    "clip_grad_norm_",
    "expert_parallel_mlp",
    "shard_experts",
]
