"""The products of an expert layer: which rows they read and write, and how their weights are stored."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import Activation
from moegemm.operators.gradients.derivatives import dispatch_modes
from moegemm.operators.gradients.main_grad import MainGrad, count_write, main_grad_of
from moegemm.operators.gradients.weight_gradients import WeightGradient
from moegemm.operators.loading import ops
from moegemm.operators.options import (
    ALLOW_TF32,
    DY_PER_TOKEN,
    FLOAT32_OUTPUT,
    PERMUTE_X,
    PERMUTE_Y,
    ROWS_PENDING,
    TRANSPOSED,
)
from moegemm.operators.packed import REFUSED_GRADIENT, Packed
from moegemm.operators.row_products import dx as _dx
from moegemm.operators.row_products import dx_low_rank as _dx_low_rank
from moegemm.operators.row_products import dx_out as _dx_out
from moegemm.operators.row_products import forward as _forward
from moegemm.operators.row_products import forward_out as _forward_out
from moegemm.sharded import PLAIN_TENSORS

_forward_pair: Callable[..., Tensor] = ops.forward_pair.default
_combine: Callable[..., Tensor] = ops.combine.default
_combine_out: Callable[..., None] = ops.combine_out.default
_combine_rows: Callable[..., Tensor] = ops.combine_rows.default
_add_rows: Callable[..., None] = ops.add_rows.default
_combine_rows_out: Callable[..., None] = ops.combine_rows_out.default

AnyWeight = Tensor | Packed


def nothing_between(*tensors: AnyWeight | None) -> bool:
    """Whether the launches of two operators follow one another. A compiler may put what makes these tensors, the cast
    of a weight, between them. A dispatch mode or a tensor subclass may launch something of its own before one."""
    if torch.compiler.is_compiling() or dispatch_modes() > 0:
        return False
    parts = [p for t in tensors for p in ((t.values, t.scales) if isinstance(t, Packed) else (t,))]
    return all(part is None or type(part) in PLAIN_TENSORS for part in parts)


class Routed(NamedTuple):
    """Which row belongs to which expert, and where the rows are: those of tokens, or in expert order as they come."""

    m_sizes: Tensor  # [E], or what else operators/segments.py has
    gather_indices: Tensor | None  # [M]; None: rows come and go in expert order
    topk: int = 1
    positions: Tensor | None = None  # [T, topk]: M is a capacity, and only slots with a position have a row
    tails: str = ""  # the words of tail_options: what passes do outside the segments, and how many rows they expect

    def rows(self, x: Tensor) -> int:
        """M of a first product that reads x."""
        return x.size(0) if self.gather_indices is None else self.gather_indices.size(0)

    def reads_tokens(self) -> str:
        """The words for a product whose X is the layer's input."""
        return "" if self.gather_indices is None else PERMUTE_X

    def reads_d_out(self) -> str:
        """The words for a product whose dY is the gradient of the layer's output."""
        return "" if self.gather_indices is None else PERMUTE_Y + DY_PER_TOKEN

    def unsummed(self) -> tuple[Tensor | None, int, str]:
        """Indices, topk and words of a dX with the gradient of each row that a first product read: in flat order, or
        where rows have positions or no indices in expert order."""
        if self.gather_indices is None or self.positions is not None:
            return None, 1, ""
        return self.gather_indices, self.topk, PERMUTE_X

    def sums_tokens(self) -> bool:
        """Whether the gradient of a token is a sum over its rows."""
        return self.gather_indices is not None and (self.positions is not None or self.topk > 1)

    def summed(
        self, rows: Tensor, weights: Tensor | None, out: Tensor | None, rows_pending: bool = False
    ) -> Tensor:  # fmt: skip
        """[T, C] of flat rows, or with positions of rows in expert order. rows_pending: of what this reads the launch
        ahead writes the rows, and nothing else."""
        if self.positions is not None and out is None and rows_pending:
            out = rows.new_empty((self.positions.size(0), rows.size(1)))
            _combine_rows_out(rows, weights, self.positions, out, True)
            return out
        if self.positions is not None and out is not None:
            _combine_rows_out(rows, weights, self.positions, out, rows_pending)
        elif self.positions is not None:
            return _combine_rows(rows, weights, self.positions, False)
        elif out is not None:
            _combine_out(rows, weights, self.topk, out)
        else:
            return _combine(rows, weights, self.topk, False)
        count_write(out)
        return out


class Weights(NamedTuple):
    """How one product's W is stored: [E, N, K], or [E, K, N] with transposed. Neither is ever copied."""

    options: str  # TRANSPOSED and ALLOW_TF32, each or not, and the words of tail_options
    accumulated: MainGrad | None = None
    word: str = ""  # of a quantised W: see Packed

    def after_its_rows(self) -> "Weights":
        """For a product of whose operands the launch ahead writes the rows, and nothing else."""
        return self._replace(options=self.options + ROWS_PENDING)

    def columns(self, w: AnyWeight) -> int:
        """N."""
        return w.size(2 if TRANSPOSED in self.options else 1)

    def joined(self, w: Any, scales: Tensor | None) -> Any:
        """W as the methods below take it, of the tensors that autograd has seen."""
        return w if scales is None else Packed(w, scales, self.word)

    def from_tokens(self, tokens: Tensor, w: AnyWeight, routed: Routed) -> Tensor:
        """[T, K] -> [M, N] in expert order: row r reads its token. The first product."""
        return _forward(tokens, w, *routed[:2], None, routed.topk, routed.reads_tokens() + self.options)

    def both_from_tokens(
        self, tokens: Tensor, w: Tensor, w_up: Tensor, routed: Routed, bias: Tensor | None = None, activation: str = ""
    ) -> Tensor:
        """from_tokens of two weights for which `are_a_pair` holds, [M, 2 N] with the halves side by side; with an
        activation its bias is added and nothing but activated rows is kept."""
        words = routed.reads_tokens() + self.options
        return _forward_pair(tokens, w, w_up, *routed[:2], routed.topk, words, bias, activation)

    def from_tokens_into(self, tokens: Tensor, w: AnyWeight, routed: Routed, pre: Tensor) -> None:
        """The same into `pre`, which may be some columns of a wider matrix."""
        _forward_out(tokens, w, *routed[:2], None, routed.topk, routed.reads_tokens() + self.options, None, pre)

    def activated_from_tokens(
        self, tokens: Tensor, w: AnyWeight, bias: Tensor | None, activation: Activation, routed: Routed
    ) -> Tensor:
        """from_tokens with its bias and activation: nothing but activated rows is kept, with the same bits."""
        words = routed.reads_tokens() + self.options
        return _forward(tokens, w, *routed[:2], None, routed.topk, words, None, bias, activation.text())

    def to_flat(self, rows: Tensor, w: AnyWeight, routed: Routed, bias: Tensor | None = None) -> Tensor:
        """[M, K] in expert order -> [M, N] in flat order. The second product, which adds its bias before it rounds."""
        return _forward(rows, w, *routed[:2], None, routed.topk, PERMUTE_Y + self.options, None, bias)

    def in_order(
        self, rows: Tensor, w: AnyWeight, routed: Routed, bias: Tensor | None = None, out: Tensor | None = None,
        float32: bool = False,
    ) -> Tensor:  # fmt: skip
        """[M, K] in expert order -> [M, N] in expert order."""
        if out is None:
            words = self.options + (FLOAT32_OUTPUT if float32 else "")
            return _forward(rows, w, routed.m_sizes, None, None, 1, words, None, bias)
        _forward_out(rows, w, routed.m_sizes, None, None, 1, self.options, None, out, bias)
        count_write(out)
        return out

    def to_output(
        self, rows: Tensor, w: AnyWeight, routed: Routed, bias: Tensor | None, router_weights: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The layer's output of activated rows: the second product, and the sum of each token's rows."""
        if routed.gather_indices is None:
            return self.in_order(rows, w, routed, bias, out)
        if routed.positions is None:
            return routed.summed(self.to_flat(rows, w, routed, bias), router_weights, out)
        in_order = self.in_order(rows, w, routed, bias)
        return routed.summed(in_order, router_weights, out, ROWS_PENDING in self.options)

    def from_output_gradient(self, d_out: Tensor, w: AnyWeight, routed: Routed) -> Tensor:
        """The gradient of the second product's rows; every slot of a token has the token's gradient [T, N]."""
        return _dx(d_out, w, *routed[:2], None, routed.topk, routed.reads_d_out() + self.options)

    def gradient_of_first(self, d_rows: Tensor, tokens: Tensor, routed: Routed) -> WeightGradient:
        """dW of from_tokens."""
        words = routed.reads_tokens() + self.options
        return WeightGradient(d_rows, tokens, *routed[:2], None, routed.topk, words, None, self.accumulated)

    def gradient_of_second(self, d_out: Tensor, rows: Tensor, routed: Routed) -> WeightGradient:
        """dW of the second product, from the output's gradient and rows that are scaled by their weights."""
        words = routed.reads_d_out() + self.options
        return WeightGradient(d_out, rows, *routed[:2], None, routed.topk, words, None, self.accumulated)

    def unsummed_tokens_gradient(
        self, d_rows: Tensor, w: AnyWeight, routed: Routed, words: str = "", out: Tensor | None = None
    ) -> Tensor:
        """The gradient of each row that from_tokens read, in the order of Routed.unsummed."""
        indices, topk, order = routed.unsummed()
        arguments = (d_rows, w, routed.m_sizes, indices, None, topk, self.options + order + words)
        if out is None:
            return _dx(*arguments)
        _dx_out(*arguments, None, out)
        count_write(out)
        return out

    def unsummed_gradient_of_both(
        self, d_pre: Tensor, w: Tensor, w_up: Tensor, routed: Routed, out: Tensor | None
    ) -> Tensor:
        """The same of two products whose weights are stored alike: one contraction over the columns of both, the second
        of which the operators know as a low-rank part."""
        middle = self.columns(w)
        d_gate, d_up = d_pre[:, :middle], d_pre[:, middle:]
        indices, topk, order = routed.unsummed()
        words = self.options + order
        if out is None:
            return _dx_low_rank(d_gate, w, routed.m_sizes, indices, d_up, w_up, topk, words)
        _dx_out(d_gate, w, routed.m_sizes, indices, None, topk, words, None, out, None, "", d_up, w_up)
        count_write(out)
        return out

    def tokens_gradient(self, d_rows: Tensor, w: AnyWeight, routed: Routed, out: Tensor | None = None) -> Tensor:
        """The gradient [T, K] of from_tokens' tokens."""
        if not routed.sums_tokens():
            return self.unsummed_tokens_gradient(d_rows, w, routed, out=out)
        pending = d_rows.is_cuda and nothing_between(w)
        return routed.summed(self.unsummed_tokens_gradient(d_rows, w, routed), None, out, pending)


def are_a_pair(pair: tuple[Weights, Weights | None], w: AnyWeight, w_up: AnyWeight | None) -> bool:
    """Whether one operator takes both: plain weights [E, N, K], with rows as far apart in either."""
    if not isinstance(w, Tensor) or not isinstance(w_up, Tensor) or pair[1] is None:
        return False
    alike = pair[0].options == pair[1].options and w.stride() == w_up.stride()
    return alike and TRANSPOSED not in pair[0].options


def tokens_gradient_of_pair(
    pair: tuple[Weights, Weights], d_pre: Tensor, w_gate: AnyWeight, w_up: AnyWeight, routed: Routed, out: Tensor | None
) -> Tensor:
    """The gradient of tokens that two products read: of each row the sum of both in fp32, rounded once. The sum over a
    token's rows takes them rounded, as where one product makes them: rows may come back from other ranks."""
    if isinstance(w_gate, Tensor) and isinstance(w_up, Tensor) and pair[0].options == pair[1].options:
        summed = routed.sums_tokens()
        rows = pair[0].unsummed_gradient_of_both(d_pre, w_gate, w_up, routed, None if summed else out)
        return routed.summed(rows, None, out) if summed else rows
    middle = pair[0].columns(w_gate)
    gate = pair[0].unsummed_tokens_gradient(d_pre[:, :middle], w_gate, routed, FLOAT32_OUTPUT)
    up = pair[1].unsummed_tokens_gradient(d_pre[:, middle:], w_up, routed, FLOAT32_OUTPUT)
    if routed.gather_indices is None:
        result = torch.empty_like(gate, dtype=d_pre.dtype) if out is None else out
        _add_rows(gate, up, routed.m_sizes, result, routed.tails)
        if out is not None:
            count_write(out)
        return result
    rows = gate.add_(up).to(d_pre.dtype)
    if routed.sums_tokens():
        return routed.summed(rows, None, out)
    return rows if out is None else out.copy_(rows)


def _as_stored(w: AnyWeight, transposed: bool, words: str, accumulated: MainGrad | None) -> tuple[AnyWeight, Weights]:
    """The same W as its memory lies: a transposed view is the other layout, not a reason to copy."""
    if isinstance(w, Packed):
        return w, Weights(words, None, w.word)
    if w.dim() == 3 and w.stride(-1) != 1 and w.stride(-2) == 1:
        w, transposed = w.transpose(-1, -2), not transposed
        if accumulated is not None:
            accumulated = accumulated._replace(transposed=True)
    return w, Weights((TRANSPOSED if transposed else "") + words, accumulated)


class StoredWeights(NamedTuple):
    """The weights of a layer as they lie in memory, and how to use them."""

    w_gate_up: AnyWeight
    w_up: AnyWeight | None
    w_down: AnyWeight
    first: Weights
    up: Weights | None
    second: Weights


def stored_weights(
    used: tuple[AnyWeight, AnyWeight | None, AnyWeight], given: tuple[Any, Any],
    transposed: bool, allow_tf32: bool, accumulate: bool, tails: str = "",
) -> StoredWeights:  # fmt: skip
    """`used` are w_gate_up, w_up and w_down as the products read them, `given` w_gate_up and w_down as the caller gave
    them: autocast makes others of them, and a main_grad hangs on the latter. `tails`: the words of tail_options."""
    words = (ALLOW_TF32 if allow_tf32 else "") + tails
    w_gate_up, w_up, w_down = used
    first_given, down_given = given
    of_gate, of_up = first_given if isinstance(first_given, (tuple, list)) else (first_given, None)
    goals: list[MainGrad | None] = [None, None, None]
    for w in used:
        if accumulate and isinstance(w, Packed):
            raise TypeError(f"accumulate is True with a weight in {w.word}; {REFUSED_GRADIENT}")
    if accumulate and torch.is_grad_enabled():
        names = ("w_gate_up" if of_up is None else "w_gate_up[0]", "w_gate_up[1]", "w_down")
        for at, (w, name) in enumerate(zip((of_gate, of_up, down_given), names, strict=True)):
            goals[at] = main_grad_of(w, name) if w is not None and w.requires_grad else None
    w_gate_up, first = _as_stored(w_gate_up, transposed, words, goals[0])
    up = None
    if w_up is not None:
        w_up, up = _as_stored(w_up, transposed, words, goals[1])
    w_down, second = _as_stored(w_down, transposed, words, goals[2])
    return StoredWeights(w_gate_up, w_up, w_down, first, up, second)


def gate_up_product(
    pair: tuple[Weights, Weights | None], tokens: Tensor, w_gate_up: AnyWeight, w_up: AnyWeight | None, routed: Routed
) -> Tensor:
    """[M, C] in expert order. Gate and up as two tensors write the two halves of one matrix."""
    first, up = pair
    if up is None or w_up is None:
        return first.from_tokens(tokens, w_gate_up, routed)
    if are_a_pair(pair, w_gate_up, w_up):
        return first.both_from_tokens(tokens, w_gate_up, w_up, routed)  # type: ignore[arg-type]
    middle = first.columns(w_gate_up)
    pre = torch.empty((routed.rows(tokens), 2 * middle), dtype=tokens.dtype, device=tokens.device)
    first.from_tokens_into(tokens, w_gate_up, routed, pre[:, :middle])
    up.from_tokens_into(tokens, w_up, routed, pre[:, middle:])
    return pre
