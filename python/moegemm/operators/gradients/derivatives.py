"""Refuses derivatives that do not exist, with a message: torch itself would return zeros, or None.

No gradient here can be differentiated again, and only `grouped_gemm` and `combine` have a forward-mode derivative.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moegemm.operators.errors import explain

inside_torch_func: Callable[[], bool] = torch._C._are_functorch_transforms_active
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many are active: FakeTensorMode and others


def forward_mode_active() -> bool:
    """Whether any tensor may have a tangent: inside torch.func.jvp and forward_ad.dual_level."""
    return forward_ad._current_level >= 0


def primal_of(tensor: Tensor) -> Tensor:
    """The tensor without its tangent."""
    primal: Tensor = forward_ad.unpack_dual(tensor).primal  # type: ignore[no-untyped-call]
    return primal


def transforms_active() -> bool:
    """Whether tangents or a transform of torch.func may look at a call; torch.compile traces the latter itself."""
    return forward_mode_active() or (inside_torch_func() and not torch.compiler.is_compiling())


class _Refusal(torch.autograd.Function):
    """Passes `result` through and refuses to be differentiated; `sources` is what it depends on."""

    @staticmethod
    def forward(sentence: str, result: Tensor, *sources: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.sentence = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(ctx.sentence)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ctx.sentence)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int | None]:
        return _refuse(*args), in_dims[1]


_refuse: Callable[..., Tensor] = _Refusal.apply


def _once_only(name: str) -> str:
    return f"{name} can be differentiated once only; it has no second derivative"


def _refuse_tangents(sentence: str, tensors: tuple[object, ...]) -> None:
    given = [t for t in tensors if isinstance(t, Tensor)]
    if torch.compiler.is_compiling():  # Dynamo does not trace what asks a tensor for its tangent
        raise NotImplementedError(sentence)
    _refuse(sentence, given[0], *given)


def refuse_forward_mode(name: str, *tensors: object) -> None:
    """For a function without a forward-mode derivative: raises if one of its tensors has a tangent."""
    if forward_mode_active():
        sentence = f"{name} has no forward-mode derivative; moegemm.grouped_gemm and moegemm.combine have one"
        _refuse_tangents(sentence, tensors)


def refuse_traced_forward_mode(name: str) -> None:
    """For a function with a forward-mode derivative, which Dynamo does not trace: without fullgraph it runs eagerly."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} has no forward-mode derivative inside torch.compile(fullgraph=True)")


def refuse_tangents_in_backward(name: str, *sources: object) -> None:
    """Raises if a tensor that gradients are about to be made from has a tangent, which they would lack."""
    if forward_mode_active():
        _refuse_tangents(_once_only(name), sources)


def once_only(
    name: str, gradients: tuple[Tensor | None, ...], sources: tuple[object, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients; where autograd records how they are made from `sources`, they refuse to be differentiated."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    given = [t for t in sources if isinstance(t, Tensor)]
    return tuple(None if g is None else _refuse(_once_only(name), g, *given) for g in gradients)


def differentiated_once(
    name: str, compute: Callable[[Any, Tensor, tuple[Any, ...]], tuple[Tensor | None, ...]], ctx: Any, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """What `compute` makes of a backward's gradient and of what was saved: gradients that have none themselves."""
    saved = ctx.saved_tensors  # once: checkpointing does not hand it out again
    refuse_tangents_in_backward(name, gradient, *saved)
    try:
        with torch.no_grad():
            # Once: an expanded gradient would be copied by each product that reads it.
            found = compute(ctx, gradient.contiguous(), saved)
    except RuntimeError as error:
        raise explain(error, {}) from None
    return once_only(name, found, (gradient, *saved))


def vmap_refusal(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} cannot be vmapped: its rows are already grouped by expert; put the batch into the rows"
    )
