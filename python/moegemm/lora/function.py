"""The expert layer with low-rank parts inside its products, and all gradients, as one differentiable function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import Activation
from moegemm.expert_layer.function import (
    BEFORE,
    TENSORS,
    LayerCall,
    LayerTensors,
    down_bias_gradient,
    joined,
    through_activation,
)
from moegemm.expert_layer.weights import AnyWeight, Routed, Weights, nothing_between
from moegemm.lora.kept import kept_pairs
from moegemm.lora.low_rank import Adapted, LowRank, Pair, pairs_of, split_gradients
from moegemm.operators.gradients.derivatives import differentiated_once, vmap_refusal
from moegemm.operators.loading import ops
from moegemm.operators.options import ALLOW_TF32, FLOAT32_OUTPUT, MULTIPLY, PERMUTE_X, PERMUTE_Y, TRANSPOSED
from moegemm.operators.packed import split
from moegemm.operators.row_products import dx_low_rank as _dx_low_rank
from moegemm.operators.row_products import forward_low_rank as _forward_low_rank
from moegemm.operators.shortcuts import apply_function

_dx: Callable[..., Tensor] = ops.dx.default
_dw: Callable[..., Tensor] = ops.dw.default
_activate: Callable[..., Tensor] = ops.activate.default
_expert_sums: Callable[..., Tensor] = ops.expert_sums.default
_factor_rows: Callable[..., Tensor] = ops.factor_rows.default

_torch_c: Any = torch._C

MOST_ROWS_PER_EXPERT = 8  # on average, for thin products that read factors in place: more rows want tiles of more


class LoraCall(NamedTuple):
    """What a call asks for besides its tensors."""

    layer: LayerCall
    first_scalings: tuple[float, ...]  # of each adapter
    second_scalings: tuple[float, ...]

    def factors(self) -> int:
        """How many tensors the adapters have."""
        return 2 * (len(self.first_scalings) + len(self.second_scalings))


def _adapters(call: LoraCall, factors: Sequence[Tensor]) -> tuple[list[LowRank], list[LowRank]]:
    """Those of the first product and those of the second, from A, B, A, B, ..."""
    scalings = call.first_scalings + call.second_scalings
    lows = [LowRank(factors[2 * i], factors[2 * i + 1], scaling) for i, scaling in enumerate(scalings)]
    return lows[: len(call.first_scalings)], lows[len(call.first_scalings) :]


def _products(call: LoraCall, factors: Sequence[Tensor]) -> list[Adapted]:
    """The first and the second."""
    products = zip(_adapters(call, factors), (call.layer.first, call.layer.second), strict=True)
    return [Adapted(lows, TRANSPOSED in weights.options) for lows, weights in products]


def _lie_aligned(a: Tensor, x: Tensor) -> bool:
    """Whether every row of A [E, r, K] and of x, which has 16 bits, begins at a multiple of 16 bytes."""
    step = 16 // a.element_size()
    return (
        a.size(2) % 8 == 0
        and a.stride(2) == 1
        and a.stride(0) % step == 0
        and a.stride(1) % step == 0
        and a.storage_offset() % step == 0
        and x.storage_offset() % 8 == 0
        and (x.size(0) <= 1 or x.stride(0) % 8 == 0)
    )


def _reads_factor(a: Tensor, transposed: bool, routed: Routed, x: Tensor) -> bool:
    """Whether the thin product of a few rows can read A [E, r, K] where it is: bits are the same, and the A of an owner
    would be copied only for the few rows that read it."""
    if transposed or torch.compiler.is_compiling() or not x.is_cuda:
        return False
    return (
        routed.rows(x) <= MOST_ROWS_PER_EXPERT * a.size(0)
        and x.element_size() == 2
        and a.dtype in (x.dtype, torch.float32)
        and _lie_aligned(a, x)
        and routed.m_sizes.dim() == 1
    )


def _inference_pairs(
    products: Sequence[Adapted], routed: Routed, x: Tensor
) -> tuple[list[Pair | None], list[bool], bool]:  # fmt: skip
    """The pairs of both products, whether their thin products read A in place, and whether this launched a copy."""
    pairs = kept_pairs(products, x)
    if pairs is not None:
        reads = [
            pair is not None and _reads_factor(pair.a, product.transposed, routed, x)
            for product, pair in zip(products, pairs, strict=True)
        ]
        return pairs, reads, False
    reads = [len(one.lows) == 1 and _reads_factor(one.lows[0].A, one.transposed, routed, x) for one in products]
    products = [one._replace(copies_a=not in_place) for one, in_place in zip(products, reads, strict=True)]
    pairs = pairs_of(products, x, routed.m_sizes)
    copied = not torch.compiler.is_compiling() and any(  # compiled, nobody asks: nothing_between
        pair is not None and not _torch_c._is_alias_of(pair.b, one.lows[0].B)
        for one, pair in zip(products, pairs, strict=True)
    )
    return pairs, reads, copied


def _keeps_pairs(call: LoraCall, rows: int, t: LayerTensors, factors: Sequence[Tensor]) -> bool:
    """Whether the backward gets the pairs of the forward instead of making them again: where they are copies, and with
    the thin products at most an eighth of the first product, x and the output."""
    if torch.compiler.is_compiling() or any(factor.dtype == t.x.dtype for factor in factors):
        return False
    ranks = sum(a.size(1) for a in factors[::2])
    kept = sum(factor.numel() for factor in factors) + rows * ranks
    return 8 * kept <= rows * call.layer.first.columns(t.w_gate_up) + 2 * t.x.numel()


def _first(
    weights: Weights, x: Tensor, w: AnyWeight, pair: Pair | None, routed: Routed, bias: Tensor | None = None,
    activation: Activation | None = None, in_place: bool = False, apart: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The first product, activated where an activation is given, and the thin product that it read; `in_place`: the
    pair's A is the owner's; `apart`: the launch ahead writes nothing that the thin product reads then."""
    if pair is None:
        if activation is None:
            return weights.from_tokens(x, w, routed), None
        return weights.activated_from_tokens(x, w, bias, activation, routed), None
    thin = _factor_rows(x, pair.a, *routed[:3], False, apart) if in_place else weights.from_tokens(x, pair.a, routed)
    words, text = routed.reads_tokens() + weights.options, "" if activation is None else activation.text()
    return _forward_low_rank(x, w, *routed[:2], thin, pair.b, routed.topk, words, bias, text), thin


def _second(
    call: LoraCall, act: Tensor, w: AnyWeight, pair: Pair | None, routed: Routed, bias: Tensor | None,
    router_weights: Tensor | None, in_place: bool = False, follows: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The layer's output, and the thin product that it read; `in_place` as in _first. `follows`: the launches of
    this call's operators follow one another."""
    weights = call.layer.second
    if pair is None and not call.layer.weighted:
        return weights.to_flat(act, w, routed, bias), None
    if pair is None:
        return weights.to_output(act, w, routed, bias, router_weights), None
    if follows:
        weights = weights.after_its_rows()
    if in_place:
        thin = _factor_rows(act, pair.a, routed.m_sizes, None, 1, follows)
    else:
        thin = weights.in_order(act, pair.a, routed)
    if routed.positions is None:
        words, order = PERMUTE_Y + weights.options, (*routed[:2], thin, pair.b, routed.topk)
    else:
        words, order = weights.options, (routed.m_sizes, None, thin, pair.b, 1)
    rows = _forward_low_rank(act, w, *order, words, bias)
    return (routed.summed(rows, router_weights, None, follows) if call.layer.weighted else rows), thin


def _run(call: LoraCall, routed: Routed, t: LayerTensors, factors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The layer's output, and what its backward needs: the first product, the thin ones, and pairs that it keeps."""
    first_pair, second_pair = pairs_of(_products(call, factors), t.x, routed.m_sizes)
    pre, first_thin = _first(call.layer.first, t.x, t.w_gate_up, first_pair, routed)
    act = _activate(pre, t.gate_up_bias, routed.m_sizes, call.layer.activation.text(), None, routed.tails)
    out, second_thin = _second(call, act, t.w_down, second_pair, routed, t.down_bias, t.weights)
    kept: list[Tensor] = []
    if _keeps_pairs(call, routed.rows(t.x), t, factors):
        kept = [weights for pair in (first_pair, second_pair) if pair is not None for weights in pair]
    return out, pre, first_thin, second_thin, *kept


def _run_inference(call: LoraCall, routed: Routed, t: LayerTensors, factors: Sequence[Tensor]) -> Tensor:
    """The same output where no backward needs the first product: the GPU may store activated rows only."""
    follows = t.x.is_cuda and nothing_between(*t, *factors)
    pairs, in_place, copied = _inference_pairs(_products(call, factors), routed, t.x)
    # Then the launch ahead of the first thin product is that of the copies, which has seen the end of the routing.
    apart = follows and copied
    bias, activation = t.gate_up_bias, call.layer.activation
    act, _ = _first(call.layer.first, t.x, t.w_gate_up, pairs[0], routed, bias, activation, in_place[0], apart)
    return _second(call, act, t.w_down, pairs[1], routed, t.down_bias, t.weights, in_place[1], follows)[0]


class LoraLayer(torch.autograd.Function):
    """Saved for the backward are x, the first product, the routing and the thin products [M, r]. The adapters' weights
    as the products read them are made again from the parameters, unless they are small beside the rows.

    With P = X A^T and Q = dY B: Y = [X | P] [W | B]^T and dX = [dY | Q] [W ; A] are one contraction each, dA = Q^T X,
    dB = dY^T P. The second product's rows have router weights: its Q is that of the tokens' gradient without them, dA
    takes the weighted activation, which the pass over the rows leaves, and dB weighs the rows of P.
    """

    @staticmethod
    def forward(
        call: LoraCall, rest: tuple[int, str], m_sizes: Tensor, gather_indices: Tensor, positions: Tensor | None,
        *arguments: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """As those of ExpertLayer, with A and B of each adapter ahead of the scales."""
        routed, end = Routed(m_sizes, gather_indices, rest[0], positions, rest[1]), TENSORS + call.factors()
        tensors = joined(call.layer, LayerTensors(*arguments[:TENSORS]), arguments[end:])
        results = _run(call, routed, tensors, arguments[TENSORS:end])
        return tuple(result for result in results if result is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, rest, m_sizes, gather_indices, positions, *arguments = inputs
        t, end = arguments[:TENSORS], TENSORS + call.factors()
        factors, scales = arguments[TENSORS:end], arguments[end:]
        ctx.mark_non_differentiable(*output[1:])
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # or the others would get gradients of zeros; Dynamo makes none
        thin = list(output[2:])
        first_thin = thin.pop(0) if call.first_scalings else None
        second_thin = thin.pop(0) if call.second_scalings else None
        rows = (*t, output[1], m_sizes, gather_indices, positions, first_thin, second_thin)
        ctx.save_for_backward(*rows, *factors, *thin, *scales)  # what is left of the outputs are pairs
        ctx.call, ctx.rest, ctx.scales = call, rest, len(scales)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        found = differentiated_once(ctx.call.layer.name, _gradients, ctx, gradients[0])
        return *(None,) * BEFORE, *found, *(None,) * ctx.scales

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_refusal(args[0].layer.name)


def _gradients(ctx: Any, d_out: Tensor, saved: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
    """Those of LayerTensors, then of A and B of each adapter, each if needed."""
    return _Backward(ctx, d_out, saved).run()


class _Backward:
    """The gradients of one call, each if needed."""

    def __init__(self, ctx: Any, d_out: Tensor, saved: tuple[Any, ...]) -> None:
        self.call, self.d_out = ctx.call, d_out
        scales = saved[len(saved) - ctx.scales :]
        saved = saved[: len(saved) - ctx.scales]
        self.t = joined(ctx.call.layer, LayerTensors(*saved[:TENSORS]), scales)
        self.pre, m_sizes, gather_indices, positions, self.first_thin, self.second_thin, *factors = saved[TENSORS:]
        self.routed = Routed(m_sizes, gather_indices, ctx.rest[0], positions, ctx.rest[1])
        count = ctx.call.factors()
        self.first, self.second = _adapters(ctx.call, factors[:count])
        self.kept = [Pair(*factors[at : at + 2]) for at in range(count, len(factors), 2)]
        self.need = LayerTensors(*ctx.needs_input_grad[BEFORE : BEFORE + TENSORS])
        needs = ctx.needs_input_grad[BEFORE + TENSORS : BEFORE + TENSORS + count]
        middle = 2 * len(self.first)
        self.need_first, self.need_second = any(needs[:middle]), any(needs[middle:])
        self.tf32 = ALLOW_TF32 if ALLOW_TF32 in ctx.call.layer.first.options else ""

    def run(self) -> tuple[Tensor | None, ...]:
        need, t, m_sizes = self.need, self.t, self.routed.m_sizes
        d_down, d_weights, d_pre, second = self._through_second()
        d_gate_up = d_gate_up_bias = d_down_bias = None
        if need.gate_up_bias:
            d_gate_up_bias = _expert_sums(d_pre, m_sizes, None, None, 1)
        if need.down_bias:
            d_down_bias = down_bias_gradient(self.d_out, self.routed, t.weights)
        if need.w_gate_up:
            d_gate_up = self.call.layer.first.gradient_of_first(d_pre, t.x, self.routed).compute()
        d_x, first = self._through_first(d_pre)
        return d_x, d_gate_up, None, d_down, d_weights, d_gate_up_bias, d_down_bias, *first, *second

    def _pair(self, lows: list[LowRank], weights: Weights) -> Pair | None:
        if lows and self.kept:
            return self.kept[0 if lows is self.first else -1]
        return pairs_of([Adapted(lows, TRANSPOSED in weights.options)], self.t.x, self.routed.m_sizes)[0]

    def _words(self, lows: list[LowRank]) -> str:
        """Gradients in fp32 where a parameter is."""
        wide = self.t.x.dtype != torch.float32 and any(low.A.dtype == torch.float32 for low in lows)
        return self.tf32 + (FLOAT32_OUTPUT if wide else "")

    def _through_second(self) -> tuple[Tensor | None, Tensor | None, Tensor, list[Tensor | None]]:
        """The gradients of w_down, the router weights, the first product, and the second's adapters."""
        t, routed, weights, d_out = self.t, self.routed, self.call.layer.second, self.d_out
        words, pair, thin = routed.reads_d_out() + weights.options, self._pair(self.second, weights), None
        if pair is None:
            rows = weights.from_output_gradient(d_out, t.w_down, routed)  # [M, I]
        else:
            thin = _dx(d_out, pair.b, *routed[:2], None, routed.topk, words)  # [M, r]
            rows = _dx_low_rank(d_out, t.w_down, *routed[:2], thin, pair.a, routed.topk, words)
        need_rows, need_weights = bool(self.need.w_down or self.need_second), bool(self.need.weights)
        compact = routed.positions is not None
        d_pre, d_weights = through_activation(
            self.call.layer, rows, self.pre, routed, t, d_out, compact, need_rows, need_weights
        )
        d_down = None
        if self.need.w_down:  # `rows` now holds the weighted activation
            d_down = weights.gradient_of_second(d_out, rows, routed).compute()
        d_a = d_b = None
        if self.need_second:
            more = self._words(self.second)
            d_a = _dw(thin, rows, routed.m_sizes, None, None, 1, more)
            words = routed.reads_d_out() + more + ("" if t.weights is None else MULTIPLY)
            d_b = _dw(d_out, self.second_thin, *routed[:2], t.weights, routed.topk, words)
        return d_down, d_weights, d_pre, split_gradients(self.second, d_a, d_b)

    def _through_first(self, d_pre: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradients of x and of the first product's adapters."""
        t, routed, weights = self.t, self.routed, self.call.layer.first
        pair = self._pair(self.first, weights)
        if pair is None:
            return weights.tokens_gradient(d_pre, t.w_gate_up, routed) if self.need.x else None, []
        thin = _dx(d_pre, pair.b, routed.m_sizes, None, None, 1, weights.options)  # [M, r]
        d_a = d_b = d_x = None
        if self.need_first:
            more = self._words(self.first)
            d_a = _dw(thin, t.x, *routed[:2], None, routed.topk, PERMUTE_X + more)
            d_b = _dw(d_pre, self.first_thin, routed.m_sizes, None, None, 1, more)
        if self.need.x:
            indices, topk, order = routed.unsummed()
            words = weights.options + order
            d_x = _dx_low_rank(d_pre, t.w_gate_up, routed.m_sizes, indices, thin, pair.a, topk, words)
            if routed.sums_tokens():
                d_x = routed.summed(d_x, None, None, d_pre.is_cuda and nothing_between(t.w_gate_up))
        return d_x, split_gradients(self.first, d_a, d_b)


def run_lora_layer(
    layer: LayerCall, routed: Routed, tensors: LayerTensors, first: Sequence[LowRank], second: Sequence[LowRank]
) -> Tensor:
    """The layer's output, with its gradients where they are wanted. `first` and `second` are its products' adapters."""
    call = LoraCall(layer, tuple(low.scaling for low in first), tuple(low.scaling for low in second))
    factors = [factor for low in (*first, *second) for factor in (low.A, low.B)]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, *factors)):
        m_sizes, gather_indices, topk, positions, tails = routed
        flat, scales = split(tensors, (1, 2, 3))
        arguments = (call, (topk, tails), m_sizes, gather_indices, positions, *flat, *factors, *scales)
        out: Tensor = apply_function(LoraLayer, *arguments)[0]
        return out
    return _run_inference(call, routed, tensors, factors)
