"""Expert layers whose experts are spread over ranks, on torch.distributed. Imported only by those who use it."""

from moegemm.distributed.all_to_all import AllToAll
from moegemm.distributed.dispatcher import Dispatched, Dispatcher
from moegemm.distributed.layer import expert_parallel_mlp

__all__ = ["AllToAll", "Dispatched", "Dispatcher", "expert_parallel_mlp"]
