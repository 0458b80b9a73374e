"""What a layer promises about its launches, when it does not, and that results are the same either way."""

import moegemm
import pytest
import torch
from moegemm.expert_layer.weights import nothing_between
from moegemm.lora.low_rank import LowRank
from moegemm.operators.loading import ops
from moegemm.operators.packed import Packed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Wrapped(Tensor):
    """Any subclass may launch what it likes before an operator."""


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_tensors_come_with_nothing_between_the_products():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    assert nothing_between(weight, None, torch.zeros(2))
    assert nothing_between(Packed(torch.zeros(2), torch.zeros(2), "mxfp4"), None, None)


def test_a_tensor_subclass_may_launch_something_between_the_products():
    wrapped = torch.zeros(2, 3).as_subclass(Wrapped)
    assert not nothing_between(wrapped, None, None)
    assert not nothing_between(torch.zeros(2), wrapped, None)
    assert not nothing_between(Packed(torch.zeros(2), wrapped, "mxfp4"), None, None)


def test_a_dispatch_mode_may_launch_something_between_the_products():
    with Watching():
        assert not nothing_between(torch.zeros(2), None, None)


def test_a_compiler_may_put_a_cast_between_the_products():
    @torch.compile(fullgraph=True, backend="eager")
    def asked(weight: Tensor) -> Tensor:
        return weight + 1 if nothing_between(weight) else weight - 1

    assert asked(torch.zeros(2)).tolist() == [-1, -1]


EXPERTS, TOPK, HIDDEN, INNER = 8, 4, 256, 192


def layer_tensors(tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=device).to(dtype)
    w_gate_up = (torch.randn(EXPERTS, 2 * INNER, HIDDEN, device=device) / 16).to(dtype)
    w_down = (torch.randn(EXPERTS, HIDDEN, INNER, device=device) / 16).to(dtype)
    ids = torch.rand(tokens, 3 * EXPERTS, device=device).topk(TOPK).indices  # two thirds are those of other ranks
    return x, w_gate_up, w_down, ids, torch.rand(tokens, TOPK, device=device)


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 16, 700, 5000])
def test_the_compact_layer_has_the_same_bits_with_and_without_promises(device, tokens):
    x, w_gate_up, w_down, ids, weights = layer_tensors(tokens, device, dtype_of(device))
    tokens_of_other_calls = torch.randn_like(x)
    with Watching():  # takes all promises away
        expected = moegemm.moe_mlp(x, w_gate_up, w_down, ids, weights, max_rows=ids.numel())
    for _ in range(10):  # launches of other calls are all around
        moegemm.moe_mlp(tokens_of_other_calls, w_gate_up, w_down, ids, weights, max_rows=ids.numel())
        found = moegemm.moe_mlp(x, w_gate_up, w_down, ids, weights, max_rows=ids.numel())
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 16, 700])
@pytest.mark.parametrize("capacity", [False, True], ids=["flat", "compact"])
def test_a_layer_with_adapters_has_the_same_bits_with_and_without_promises(device, tokens, capacity):
    x, w_gate_up, w_down, ids, weights = layer_tensors(tokens, device, dtype_of(device))

    def factors(k: int, n: int, rank: int = 16) -> LowRank:
        b = torch.randn(n, rank, EXPERTS, device=device).permute(2, 0, 1)  # as PEFT keeps it
        return LowRank(torch.randn(EXPERTS, rank, k, device=device) / 16, b, 0.5)

    adapters = factors(HIDDEN, 2 * INNER), factors(INNER, HIDDEN)
    others = factors(HIDDEN, 2 * INNER), factors(INNER, HIDDEN)
    max_rows = ids.numel() if capacity else None
    with torch.no_grad():
        with Watching():
            expected = moegemm.lora_moe_mlp(x, w_gate_up, w_down, ids, weights, *adapters, max_rows=max_rows)
        for _ in range(10):
            moegemm.lora_moe_mlp(-x, w_gate_up, w_down, ids, weights, *others, max_rows=max_rows)
            found = moegemm.lora_moe_mlp(x, w_gate_up, w_down, ids, weights, *adapters, max_rows=max_rows)
            assert torch.equal(found, expected)


def test_rows_that_are_pending_are_summed_alike(device):
    *_, ids, weights = layer_tensors(300, device, torch.float32)
    *_, positions = moegemm.route(ids, EXPERTS, return_inverse=True, max_rows=ids.numel())
    rows = torch.randn(ids.numel(), HIDDEN, device=device)
    expected = moegemm.combine(rows, weights, positions=positions)
    found = torch.full_like(expected, torch.nan)
    ops.combine_rows_out.default(rows, weights, positions, found, True)
    assert torch.equal(found, expected)
