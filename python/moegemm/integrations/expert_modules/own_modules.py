"""Experts modules that no interface describes: gate_up_proj, down_proj and a forward of their own.

What their forward computes is a guess until it has been compared: each form that the kernels have is run beside the
module's own code on a few tokens, and one that gives the same numbers is kept.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegemm.activations import GATED_LAYOUTS, Activation
from moegemm.formats import FORMATS, NAMES
from moegemm.integrations.expert_modules.experts import Stored, run_experts, why_not
from moegemm.integrations.expert_modules.forwards import OnMoegemm, give_forward, take_forward_back, why_not_replaceable
from moegemm.integrations.expert_modules.gates import NUMBER_NAMES, activation_of, split_gate, spread_numbers
from moegemm.integrations.notices import say_once, unsaid
from moegemm.integrations.peft_adapters import added_by_peft
from moegemm.operators.raw import torch_allows_tf32
from moegemm.sharded import is_distributed

_BIAS_NAMES = (("gate_up_proj_bias", "down_proj_bias"), ("gate_up_bias", "down_bias"))
_TF32_TOLERANCE = 1e-2
_TOKENS_PER_SCALE = 3
_SCALES = (0.1, 1.0, 10.0, 100.0, 1000.0)  # of the tokens: below, at and beyond any clamp


class Form(NamedTuple):
    """What a module does with its weights, besides act_fn."""

    transposed: bool
    layout: str = "concatenated"  # of gate and up; that of `_apply_gate` counts where the module has one
    limit: float = math.inf
    up_offset: float = 0.0
    bias_names: tuple[str | None, str | None] = (None, None)
    argument_names: tuple[str, ...] = ()

    def gate(self, act_fn: Any, h: Tensor) -> Tensor:
        gate, up = split_gate(h, self.layout)
        if self.limit != math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return act_fn(gate) * (up + self.up_offset) if self.up_offset else act_fn(gate) * up  # type: ignore[no-any-return]


def stored_as(module: Any, form: Form) -> Stored:
    first_bias, second_bias = (None if name is None else getattr(module, name) for name in form.bias_names)
    return Stored(module.gate_up_proj, module.down_proj, first_bias, second_bias, form.transposed)


def activation_in(module: Any, form: Form) -> Activation | None:
    """The kernels' activation for a module of this form, or None."""
    if hasattr(module, "_apply_gate"):
        return activation_of(module, True)
    plain = activation_of(module, False)
    # The limit of a gated kernel holds for up as well, that of an act_fn for the gate alone.
    if plain is None or plain.limit != math.inf:
        return None
    return plain._replace(layout=form.layout, limit=form.limit, up_offset=form.up_offset)


def run_as(module: Any, form: Form, x: Tensor, ids: Tensor, router_weights: Tensor | None) -> Tensor:
    """The layer of a module of this form."""
    own = module._apply_gate if hasattr(module, "_apply_gate") else functools.partial(form.gate, module.act_fn)
    activation = activation_in(module, form)
    stored = stored_as(module, form).with_biases_in(x.dtype).with_adapters(module, "gate_up_proj", x.dtype)
    return run_experts(type(module).__name__, x, stored, ids, router_weights, activation, own)


class OwnExperts(OnMoegemm):
    """The forward of such a module."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        form: Form = self._moegemm_form
        reason = why_not(stored_as(self, form))
        if reason is not None:
            say_once(f"{type(self).__name__} runs its own code: {reason}")
            with added_by_peft(self):
                return super().forward(*args, **kwargs)  # type: ignore[misc,no-any-return]
        hidden_states, ids, weights = (*args, *(kwargs[name] for name in form.argument_names[len(args) :]))
        # Their own forward may flatten some of the three itself, so that the others' leading dimensions differ.
        x, flat_ids = (tensor.reshape(-1, tensor.size(-1)) for tensor in (hidden_states, ids))
        flat_weights = None if weights is None else weights.reshape(-1, weights.size(-1))
        out = run_as(self, form, x.to(self.gate_up_proj.dtype), flat_ids, flat_weights)
        return out.to(hidden_states.dtype).view(hidden_states.shape)


def is_experts(module: Any) -> bool:
    """Whether a module looks like experts: weights as two tensors of three dimensions."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return all(isinstance(w, Tensor) and w.dim() == 3 for w in weights)


def _infer_transposed(module: Any) -> bool | None:
    """Whether gate_up_proj is [E, H, 2 I] (else [E, 2 I, H]), or None if the shapes fit neither."""
    _, a, b = module.gate_up_proj.shape
    _, c, d = module.down_proj.shape
    plain, transposed = (a == 2 * d and b == c), (b == 2 * c and a == d)
    return transposed if plain != transposed else None


def _infer_biases(module: Any) -> tuple[str | None, str | None]:
    for names in _BIAS_NAMES:
        found = tuple(name if isinstance(getattr(module, name, None), Tensor) else None for name in names)
        if any(found):
            return found[0], found[1]
    return None, None


def _first_form(module: Any) -> Form | str:
    """What the module's parts say, or why they are not enough."""
    parameters = list(inspect.signature(module.forward).parameters)
    if len(parameters) != 3:
        return f"its forward takes {parameters}, not (hidden_states, expert_ids, router_weights)"
    transposed = _infer_transposed(module)
    if transposed is None:
        shapes = [tuple(w.shape) for w in (module.gate_up_proj, module.down_proj)]
        return f"gate_up_proj is {shapes[0]} and down_proj {shapes[1]}; [E, 2 I, H] and [E, H, I] are accepted"
    if not hasattr(module, "_apply_gate") and not hasattr(module, "act_fn"):
        return "it has neither act_fn nor _apply_gate, so that its activation cannot be asked for"
    biases = _infer_biases(module)
    known = {"gate_up_proj", "down_proj", *biases}
    weights = itertools.chain(module.named_parameters(), module.named_buffers())
    unknown = [name for name, weight in weights if name not in known and weight.is_floating_point()]
    if unknown:
        return f"it has weights that moegemm does not know what to do with: {', '.join(unknown)}"
    return Form(transposed, bias_names=biases, argument_names=tuple(parameters))


def _candidates(module: Any, first: Form) -> Iterator[Form]:
    if hasattr(module, "_apply_gate"):
        yield first
        return
    numbers = [getattr(module, name, None) for name in NUMBER_NAMES]
    limits = [math.inf, *(float(n) for n in numbers if isinstance(n, int | float) and n > 0)]
    for layout, limit, up_offset in itertools.product(GATED_LAYOUTS, limits, (0.0, 1.0)):
        yield first._replace(layout=layout, limit=limit, up_offset=up_offset)


def _tokens(module: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A few tokens on several scales, their experts and their router weights; the same numbers each time."""
    down = module.down_proj
    # Offloaded weights are on meta until the module's hook brings them.
    device = torch.device("cpu") if down.device.type == "meta" else down.device
    experts, hidden = module.gate_up_proj.size(0), down.size(2 if _infer_transposed(module) else 1)
    tokens, topk = len(_SCALES) * _TOKENS_PER_SCALE, min(2, experts)
    numbers = spread_numbers(tokens * (hidden + 1))
    x = (numbers[: tokens * hidden].view(tokens, hidden) - 0.5) * 3.5  # of variance 1
    x = x * torch.tensor(_SCALES, dtype=torch.float64).repeat(_TOKENS_PER_SCALE).unsqueeze(1)
    # From the first expert to the last: one of them may do something of its own.
    ids = (torch.linspace(0, experts - 1, tokens).long().unsqueeze(1) + torch.arange(topk) * (experts // 2)) % experts
    # Not normalised: a forward that does it itself gives other numbers.
    weights = torch.stack([0.3 + numbers[-tokens:], 0.9 - 0.5 * numbers[-tokens:]], dim=1)[:, :topk]
    return x.to(device, down.dtype), ids.to(device), weights.to(device, down.dtype)


def _outputs(module: Any) -> Tensor:
    """[2, T, H]: what the module makes of them while training and after it."""
    training, buffers = module.training, [buffer.clone() for buffer in module.buffers()]
    arguments = _tokens(module)
    try:
        with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
            return torch.stack([module.train(mode).forward(*arguments) for mode in (True, False)])
    finally:
        module.train(training)
        for buffer, kept in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def _difference(got: Tensor, expected: Tensor) -> float:
    """The largest relative error of a token, relative to what is allowed."""
    if got.shape != expected.shape:
        return math.inf
    numbers = torch.finfo(expected.dtype)
    tolerance = FORMATS[expected.dtype].tolerance  # a lost factor, clamp or bias is far above
    if expected.dtype == torch.float32 and torch_allows_tf32(expected):
        tolerance = _TF32_TOLERANCE
    finite = expected.isfinite().all(dim=-1)
    got, expected = got[finite].double(), expected[finite].double()
    rounding = 8 * numbers.tiny * numbers.eps * math.sqrt(expected.size(-1))  # of the smallest numbers
    allowed = tolerance * expected.norm(dim=-1) + rounding
    worst = float(((got - expected).norm(dim=-1) / allowed).max())
    return math.inf if math.isnan(worst) else worst


def _why_not_comparable(expected: Any) -> str | None:
    if not isinstance(expected, Tensor) or expected.dtype not in FORMATS:
        return f"its forward does not return one tensor in one of {NAMES}"
    finite = expected.isfinite().all(dim=-1)
    if 2 * int(finite.sum()) < finite.numel():
        return "its forward gives infinities or NaN on ordinary tokens"
    if not expected[finite].any():
        return (
            "its forward gives zeros, so that nothing can be compared; patch it after loading, and let it take "
            "(hidden_states, expert_ids, router_weights) in this order"
        )
    return None


def _settle(module: Any, first: Form) -> str | None:
    """Gives the module our forward in the form that computes what its own forward does, or says why not."""
    if is_distributed(module.gate_up_proj):
        return "its weights are sharded, so that nothing can be compared; patch it before"
    if module.gate_up_proj.device.type == "meta" and "_old_forward" not in vars(module):
        return "its weights are on meta, so that nothing can be compared; patch it after loading"
    reason = why_not(stored_as(module, first), placed_later=True)
    if reason is not None:
        return reason
    try:
        expected = _outputs(module)
    except Exception as error:  # not our code: it may want other arguments
        return f"its own forward failed on [T, H] tokens with [T, topk] ids and weights: {error}"
    reason = _why_not_comparable(expected)
    if reason is not None:
        return reason
    give_forward(module, OwnExperts)
    try:
        with unsaid():
            for form in _candidates(module, first):
                module._moegemm_form = form
                if _difference(_outputs(module), expected) <= 1.0:
                    return None
    except Exception as error:  # then the module is as it was, and the others of a model are still patched
        leave(module)
        return f"moegemm's layer does not run on its weights and biases: {error}"
    leave(module)
    return "its own forward computes something else than its weights, biases and activation make in any known form"


def leave(module: Any) -> None:
    """The module's own forward again."""
    take_forward_back(module)
    del module._moegemm_form


def adopt(module: Any) -> str | None:
    """Makes an experts module run on moegemm, or says why not."""
    reason = why_not_replaceable(module)
    if reason is not None:
        return reason
    first = _first_form(module)
    return first if isinstance(first, str) else _settle(module, first)
