"""Factors that stay in the form of the products from call to call, where a caller says that they may."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moegemm.lora.low_rank import Adapted, Pair, pairs_of

_cuda = torch.cuda


class _Entry(NamedTuple):
    sources: tuple[Tensor, ...]  # held, so that their memory remains theirs
    versions: tuple[int, ...]
    pair: Pair


_Kept = dict[tuple[object, ...], _Entry]
_kept: ContextVar[_Kept | None] = ContextVar("kept_factors", default=None)


@contextlib.contextmanager
def keep_factors() -> Iterator[None]:
    """Inside, inference with adapters reads copies of their factors that the first call of each layer makes.

    Without it every call rounds and turns the factors of the experts in use again, so that any write to a parameter
    counts. Inside, writes count that torch sees: optimizers, `load_state_dict`, `copy_`. Those through `.data` or
    other libraries' pointers do not. The copies take the memory of the factors in the experts' dtype until the end.
    Kept are those of parameters. A CUDA graph that was captured inside, after a first call, reads them: replay it
    inside only. Results have the same bits. Calls that need gradients are as they are outside.

    >>> import torch, moegemm
    >>> x, w1, w2 = torch.randn(6, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
    >>> weights, ids = torch.randn(6, 4).softmax(-1).topk(2)
    >>> adapter = moegemm.LoraAdapter(4, 16, 48, rank=4)
    >>> with torch.no_grad(), moegemm.keep_factors():
    ...     outs = [moegemm.lora_moe_mlp(x, w1, w2, ids, weights, adapter) for _ in range(2)]
    >>> torch.equal(*outs)
    True
    """
    token = _kept.set({})
    try:
        yield
    finally:
        entries = _kept.get()
        _kept.reset(token)
        if entries and any(entry.pair.a.is_cuda for entry in entries.values()):
            _cuda.synchronize()  # other streams may still read them


def _key(product: Adapted, dtype: torch.dtype) -> tuple[object, ...]:
    factors = (factor for low in product.lows for factor in low[:2])
    places = tuple((f.data_ptr(), f.device, f.dtype, f.shape, f.stride()) for f in factors)
    return dtype, product.transposed, tuple(low.scaling for low in product.lows), places


def _can_keep(product: Adapted) -> bool:
    """Whether all factors are parameters, or views of them, whose writes torch counts: others are made for a call."""
    owners = [factor if factor._base is None else factor._base for low in product.lows for factor in low[:2]]
    return all(isinstance(owner, nn.Parameter) and not owner.is_inference() for owner in owners)


def kept_pairs(products: Sequence[Adapted], like: Tensor) -> list[Pair | None] | None:
    """The pairs of several products as pairs_of makes them, of all experts; None where this call is to make its own:
    outside keep_factors, and while a graph is captured that would make them only when it is replayed."""
    kept = _kept.get()
    if kept is None or torch.compiler.is_compiling():
        return None
    found: list[Pair | None] = []
    for product in products:
        if not product.lows:
            found.append(None)
            continue
        if not _can_keep(product):
            return None
        key = _key(product, like.dtype)
        sources = tuple(factor.detach() for low in product.lows for factor in low[:2])
        versions = tuple(source._version for source in sources)
        entry = kept.get(key)
        if entry is None or entry.versions != versions:
            if like.is_cuda and _cuda.is_current_stream_capturing():
                return None
            pair = pairs_of([product], like, None)[0]
            assert pair is not None
            if like.is_cuda:
                _cuda.current_stream(like.device).synchronize()  # whatever stream reads them next
            entry = kept[key] = _Entry(sources, versions, pair)
        found.append(entry.pair)
    return found
