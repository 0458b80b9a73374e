"""Memory of the caller's for a layer's result and its gradient: which is taken, and what becomes of it."""

import re

import moegemm
import pytest
import torch


@pytest.mark.parametrize("name", ["out", "grad_rows_out"])
@pytest.mark.parametrize("part", ["values", "scales"])
@pytest.mark.parametrize("which", [0, 1, "up"])
def test_memory_of_a_quantised_weight_is_refused(which, part, name):
    first, second = (moegemm.quantize(torch.randn(3, n, k), "mxfp4") for n, k in ((128, 64), (64, 64)))
    halves = [moegemm.quantize(torch.randn(3, 64, 64), "mxfp4") for _ in range(2)]
    weights = [halves if which == "up" else first, second]
    owner, argument = (halves[1], "w_gate_up[1]") if which == "up" else (weights[which], ("w_gate_up", "w_down")[which])
    memory = getattr(owner, part).data
    before = memory.clone()
    rows = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=name != "out")
    buffer = memory.view(torch.uint8).flatten()[: rows.nbytes].view(torch.bfloat16).view(3, 64)
    with pytest.raises(ValueError, match=f"{name} shares memory with {re.escape(argument)}; it must have its own"):
        moegemm.experts_mlp(rows, *weights, torch.tensor([1, 1, 1]), **{name: buffer})
    assert torch.equal(memory, before)
