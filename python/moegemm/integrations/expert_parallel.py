"""Experts that are split over ranks: how many rows a layer of this rank needs.

transformers' expert parallelism runs the whole batch on every rank and gives slots of other ranks' experts an id that
no expert has, or it exchanges tokens first, after which every slot has an expert. In the former case, with 8 ranks one
slot in eight is local on average: the compact layer computes and keeps no rows for the others.
"""

from typing import Any

import torch
from torch import Tensor


def ids_of_others_remain(module: Any) -> bool:
    """Whether transformers has split this experts module over ranks, and tokens are not exchanged before it runs."""
    if not getattr(module, "_is_expert_parallel", False):
        return False
    forward = getattr(vars(module).get("forward"), "__qualname__", "")
    return not forward.startswith("EpDispatch")


def may_synchronise(tensor: Tensor) -> bool:
    """Whether a value on the tensor's device may be waited for: not while tracing or capturing, nor where the user has
    asked torch to complain about it."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.device.type not in ("cpu", "cuda"):
        return False
    if tensor.device.type == "cpu":
        return True
    return torch.cuda.get_sync_debug_mode() == 0 and not torch.cuda.is_current_stream_capturing()


def rows_needed(ids: Tensor, experts: int) -> int:
    """The rows of ids [T, topk] that have an expert here: exactly, or as many as there can be where counting would have
    to wait. A token's ids are distinct, so that at most min(topk, E) of them are local."""
    if not may_synchronise(ids):
        return ids.size(0) * min(ids.size(1), experts)
    return int(((ids >= 0) & (ids < experts)).sum())
