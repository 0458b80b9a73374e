"""Forward and dX with a W that is a tensor or Packed: each takes the arguments of the operator of its name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moegemm.operators.loading import ops
from moegemm.operators.packed import Packed


def _of(operator: Any) -> Callable[..., Any]:
    def call(first: Tensor, w: Any, *rest: Any) -> Any:
        if type(w) is Packed:
            return operator(first, w.values, *rest, w_scales=w.scales, w_format=w.word)
        return operator(first, w, *rest)

    return call


forward: Callable[..., Tensor] = _of(ops.forward.default)
forward_out: Callable[..., None] = _of(ops.forward_out.default)
dx: Callable[..., Tensor] = _of(ops.dx.default)
dx_out: Callable[..., None] = _of(ops.dx_out.default)
forward_low_rank: Callable[..., Tensor] = _of(ops.forward_low_rank.default)
dx_low_rank: Callable[..., Tensor] = _of(ops.dx_low_rank.default)
