"""Experts that are split over ranks: how many rows a layer of this rank needs.

transformers' expert parallelism runs the whole batch on every rank and gives slots of other ranks' experts an id that
no expert has, or it exchanges tokens first, after which every slot has an expert. From 5.23 on the user names which of
the two, or leaves it to each call. In the former case, with 8 ranks one slot in eight is local on average: the compact
layer computes and keeps no rows for the others.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_read_while_tracing: Callable[[Callable[..., bool]], Callable[..., bool]] = torch.compiler.assume_constant_result


@_read_while_tracing  # nothing that torch.compile could trace, and nothing that changes
def _leaves_ids(forward: Callable[..., Any], records: bool) -> bool:
    """`forward`: the module's own, in place of its class's; `records`: the call's tokens need gradients."""
    if not getattr(forward, "__qualname__", "").startswith("EpDispatch"):
        return True
    # What exchanges tokens, from 5.23 on.
    way: Any = inspect.getclosurevars(inspect.unwrap(forward)).nonlocals.get("implementation")
    if hasattr(way, "all_reduce"):  # decides in each call: with gradients, or without a batch in common, it exchanges
        return way.all_reduce is not None and not records
    return bool(getattr(way, "needs_shared_batch", False))


def ids_of_others_remain(module: Any, tokens: Tensor) -> bool:
    """Whether transformers has split this experts module over ranks, and tokens are not exchanged before it runs."""
    if not getattr(module, "_is_expert_parallel", False):
        return False
    if "forward" not in module.__dict__:  # nothing is put in front of it
        return True
    if torch.compiler.is_compiling():
        id(module)  # what is compiled holds for this module alone
    # The function, not the module: that is no constant to the oldest torch.
    return _leaves_ids(module.__dict__["forward"], torch.is_grad_enabled() and tokens.requires_grad)


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
