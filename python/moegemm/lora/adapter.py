"""The parameters of an adapter beside one stack of frozen experts."""

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from moegemm.formats import FORMATS, NAMES
from moegemm.lora.low_rank import LowRank
from moegemm.operators.errors import shown
from moegemm.operators.raw import autocast_dtype
from moegemm.operators.rules import (
    require_integer,
    require_number,
    require_probability,
    require_same_device,
    require_tensor,
)
from moegemm.quantized.weight import QuantizedWeight
from moegemm.sharded import local_weight


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Where it is on: it would round W to its dtype, and it knows no meta tensors."""
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class LoraAdapter(nn.Module):
    """A [E, r, K] and B [E, N, r] beside one stack of frozen experts W [E, N, K].

    B starts at zero, so that a new adapter changes nothing. `scaling` is alpha / r, with use_rslora alpha / sqrt(r).
    The parameters are fp32 or have the experts' dtype. In training, dropout sets elements of the adapter's input to
    zero: those of a token for the first product, so that all of its experts miss the same ones, those of an activated
    row for the second. What remains is divided by 1 - dropout; the experts themselves see every element.

    >>> import torch, moegemm
    >>> adapter = moegemm.LoraAdapter(experts=4, in_features=16, out_features=32, rank=8, alpha=16)
    >>> adapter.A.shape, adapter.B.shape, adapter.scaling
    (torch.Size([4, 8, 16]), torch.Size([4, 32, 8]), 2.0)
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        rank: int,
        alpha: float = 16.0,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        use_rslora: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"experts": experts, "in_features": in_features, "out_features": out_features, "rank": rank}
        for name, size in sizes.items():
            require_integer(name, size, 1)
        require_number("alpha", alpha)
        require_probability("dropout", dropout)
        if dtype is not None and dtype not in FORMATS:
            raise TypeError(f"dtype is {shown(dtype)}; {NAMES} or None is accepted")
        self.A = nn.Parameter(torch.empty(experts, rank, in_features, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(experts, out_features, rank, dtype=dtype, device=device))
        self.scaling, self.dropout = alpha / (math.sqrt(rank) if use_rslora else rank), dropout
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))

    def extra_repr(self) -> str:
        experts, rank, k = self.A.shape
        return f"experts={experts}, in={k}, out={self.B.size(1)}, rank={rank}, scaling={self.scaling}"

    def low_rank(self) -> LowRank:
        """What it adds to a product now: without dropout unless it is in training."""
        a, b = local_weight("A", self.A), local_weight("B", self.B)
        return LowRank(a, b, self.scaling, self.dropout if self.training else 0.0)

    def _added(self, w: Tensor, scaling: float, transposed: bool) -> Tensor:
        """W plus scaling * B A in fp32, rounded once."""
        if isinstance(w, QuantizedWeight):
            raise TypeError(f"w is in {w.word}; nothing can be added to a quantised weight: w.dequantize() is accepted")
        require_tensor("w", w)
        if not w.dtype.is_floating_point:
            raise TypeError(f"w has dtype {w.dtype}; a floating dtype is accepted")
        require_same_device("w", w, "A", self.A)
        a, b = self.A.float(), self.B.float()
        left, right = (a.transpose(1, 2), b.transpose(1, 2)) if transposed else (b, a)
        shape = (left.size(0), left.size(1), right.size(2))
        if tuple(w.shape) != shape:
            raise ValueError(
                f"w is {list(w.shape)}; its shape must be {'[E, K, N]' if transposed else '[E, N, K]'} = {list(shape)}"
            )
        with _without_autocast(w.device):
            return torch.baddbmm(w.float(), left, right, alpha=scaling).to(w.dtype)

    def merged(self, w: Tensor, transposed: bool = False) -> Tensor:
        """W + scaling * B A, for serving without the adapter: exact but for fp32 sums and the rounding to W's dtype."""
        return self._added(w, self.scaling, transposed)

    def unmerged(self, w: Tensor, transposed: bool = False) -> Tensor:
        """W - scaling * B A: what `merged` was given, but for those roundings."""
        return self._added(w, -self.scaling, transposed)
