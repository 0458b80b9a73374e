"""dW: where it goes, and when it is computed."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.operators.errors import explain, shown
from moegemm.operators.gradients.derivatives import inside_torch_func
from moegemm.operators.gradients.main_grad import MainGrad, count_write, gradient_after_adding
from moegemm.operators.loading import ops
from moegemm.operators.options import ACCUMULATE, FLOAT32_OUTPUT, TRANSPOSED, without
from moegemm.operators.rules import is_integer

_dw: Callable[..., Tensor] = ops.dw.default
_dw_out: Callable[..., None] = ops.dw_out.default


class WeightGradient(NamedTuple):
    """One dW, ready to be computed: the arguments of the operator, and where it goes."""

    dy: Tensor
    x: Tensor
    m_sizes: Tensor
    gather_indices: Tensor | None
    router_weights: Tensor | None
    topk: int
    options: str
    config: list[int] | None = None
    target: MainGrad | None = None

    def compute(self, buffer: Tensor | None = None) -> Tensor | None:
        """dW, or what autograd gets once it is in a main_grad. `buffer` is that of the target, where it was asked."""
        arguments = self[:6]
        if self.target is None:
            return _dw(*arguments, self.options, self.config)
        self._write(self.target.buffer() if buffer is None else buffer, self.target.overwritten())
        parameter = self.target.parameter
        shape = parameter.mT.shape if self.target.transposed else parameter.shape
        return gradient_after_adding(parameter, shape)

    def _write(self, buffer: Tensor, overwrite: bool) -> None:
        """Adds in fp32 and rounds once: to a bf16 buffer from a dW in fp32, which lives until it is added."""
        arguments = self[:6]
        if buffer.dtype == torch.float32 or (overwrite and buffer.dtype == self.dy.dtype):
            options = self.options + ("" if overwrite else ACCUMULATE)
            target = buffer
            if buffer.dim() == 3 and buffer.stride(-1) != 1 and buffer.stride(-2) == 1:  # stored the other way round
                target = buffer.transpose(-1, -2)
                options = without(options, TRANSPOSED) if TRANSPOSED in options else options + TRANSPOSED
            _dw_out(*arguments, options, self.config, target)
            count_write(buffer)
            return
        exact = _dw(*arguments, self.options + FLOAT32_OUTPUT, self.config).view(buffer.shape)
        if overwrite:
            buffer.copy_(exact)
        else:
            buffer.add_(exact)


class _Deferred:
    """A dW that waits, and the W of its product. What it reads may not change meanwhile."""

    def __init__(self, w: Tensor, gradient: WeightGradient) -> None:
        self.w, self.nodes = w, _nodes_of(w)
        self._gradient: WeightGradient | None = gradient  # until it is computed: what it keeps goes then
        self._versions = tuple(map(_version, gradient[:5]))
        self._buffer: Tensor | None = None
        self._dw: Tensor | None = None

    @property
    def computed(self) -> bool:
        return self._gradient is None

    def prepare(self) -> None:
        """Everything that can be refused, before anything is computed."""
        if self._gradient is None:
            return
        self._require_unchanged(self._gradient[:5])
        target = self._gradient.target
        self._buffer = None if target is None else target.buffer()

    def compute(self) -> None:
        """Once: a run after one that an error ended does not add to a main_grad again."""
        if self._gradient is None:
            return
        try:
            with torch.no_grad():
                dw = self._gradient.compute(self._buffer)
        except RuntimeError as error:
            raise explain(error, {}) from None
        self._dw = None if dw is None else dw.view(self.w.shape)
        self._gradient = self._buffer = None

    def take(self) -> Tensor | None:
        """dW, which is kept no longer."""
        self.compute()
        dw, self._dw = self._dw, None
        return dw

    def _require_unchanged(self, tensors: Sequence[Any]) -> None:
        for tensor, version in zip(tensors, self._versions, strict=True):
            if _version(tensor) != version:
                assert isinstance(tensor, Tensor)
                raise RuntimeError(
                    f"weight_gradients waits for a tensor of shape {list(tensor.shape)} that was written in place "
                    f"since the backward (version {_version(tensor)}, then {version}); it must stay so until run()"
                )


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _nodes_of(w: Tensor) -> frozenset[Any]:
    """What autograd has between a parameter and W: views, casts, computations."""
    found: set[Any] = set()
    left: list[Any] = [w.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in found or not node.next_functions:  # the last are those of parameters
            continue
        found.add(node)
        left += [before for before, _ in node.next_functions]
    return frozenset(found)


class _Run(torch.autograd.Function):
    """Hands dW to autograd at the W of its product, as the backward would have: views, casts and hooks see it, and a
    parameter takes it over without a copy."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, deferred: _Deferred) -> Tensor:
        ctx.deferred = deferred
        return w.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.deferred.take(), None


_run: Callable[..., Tensor] = _Run.apply


class _Apart(torch.autograd.Function):
    """W for a product whose dW waits: it requires grad, as W does, but nothing of it reaches W, nor its hooks."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, w: list[Tensor]) -> Tensor:
        return w[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        return None, None


def apart(w: Tensor) -> Tensor:
    """What a product reads instead of `w` if dW is left to a queue."""
    if not w.requires_grad or not torch.is_grad_enabled():
        return w
    apply: Callable[..., Tensor] = _Apart.apply
    return apply(torch.empty(0, requires_grad=True), [w])


def _hand_over(entries: Sequence[_Deferred], retain_graph: bool = False) -> None:
    with torch.enable_grad():
        ends = [_run(each.w, each) for each in entries]
    torch.autograd.backward(ends, retain_graph=retain_graph)


class WeightGradients:
    """Weight gradients that a backward leaves for later: what pipeline schedules fill their bubbles with.

    Given as `weight_gradients=` to grouped_gemm, moe_mlp or experts_mlp. The backward then computes every gradient but
    those of the weights, and keeps what these are made from. `run()` computes them and hands them to autograd: they
    end in `grad`, or with accumulate in `main_grad`, as they would have, and hooks of the parameters run then.

    >>> import torch, moegemm
    >>> X, W = torch.ones(3, 4), torch.ones(2, 5, 4, requires_grad=True)        # [M, K], [E, N, K]
    >>> later = moegemm.WeightGradients()
    >>> moegemm.grouped_gemm(X, W, torch.tensor([1, 2]), topk=1, weight_gradients=later).sum().backward()
    >>> W.grad is None, len(later)
    (True, 1)
    >>> later.run()
    >>> W.grad[:, 0, 0]
    tensor([1., 2.])
    """

    def __init__(self) -> None:
        self._waiting: deque[list[_Deferred]] = deque()
        self._ran = False

    def __len__(self) -> int:
        """Backward passes that wait."""
        return len(self._waiting)

    def __bool__(self) -> bool:
        return True  # one without entries is still a queue

    def add(self, gradients: Sequence[tuple[Tensor, WeightGradient]]) -> None:
        """What one backward leaves: each product's W, as autograd knows it, and its dW."""
        self._waiting.append([_Deferred(w, gradient) for w, gradient in gradients])

    def run(self, calls: int | None = None) -> None:
        """Computes what the first `calls` backward passes left, by default all of them. After an error what was not
        computed still waits: another run() goes on with it."""
        if calls is not None and not is_integer(calls):
            raise TypeError(f"calls is {shown(calls)} of type {type(calls).__name__}; an int or None is accepted")
        waiting = len(self._waiting)
        if waiting == 0:
            why = "was run already" if self._ran else "was not filled"
            raise RuntimeError(
                f"weight_gradients {why}: 0 backward passes wait in it; run() computes each once, after its backward"
            )
        if calls is not None and not 1 <= calls <= waiting:
            raise ValueError(f"calls is {calls}; {waiting} backward passes wait, so 1 to {waiting} are accepted")
        for _ in range(waiting if calls is None else calls):  # one by one: the sums' order is that of the backwards
            self._run_first()
            self._waiting.popleft()
            self._ran = True

    def _run_first(self) -> None:
        """The oldest backward pass that waits. Its entries leave as autograd gets them."""
        call = self._waiting[0]
        for each in call:
            each.prepare()
        for parameter in [each for each in call if not each.nodes]:
            try:
                _hand_over([parameter])
            finally:
                if parameter.computed:
                    call.remove(parameter)
        derived = call.copy()
        for each in derived:  # all of them before the first is on its way through what made its W
            each.compute()
        nodes = frozenset[Any]().union(*(each.nodes for each in derived))
        later = (each for waiting in list(self._waiting)[1:] for each in waiting)
        shared = bool(nodes) and any(not nodes.isdisjoint(each.nodes) for each in later)
        call.clear()
        if derived:
            _hand_over(derived, shared)


def require_queue(weight_gradients: object) -> None:
    if weight_gradients is not None and not isinstance(weight_gradients, WeightGradients):
        raise TypeError(
            f"weight_gradients is {shown(weight_gradients)} of type {type(weight_gradients).__name__}; a "
            "moegemm.WeightGradients or None is accepted"
        )
    if weight_gradients is not None and (torch.compiler.is_compiling() or inside_torch_func()):
        raise NotImplementedError(
            "weight_gradients is given inside torch.compile or torch.func; only eager calls leave gradients for later"
        )
