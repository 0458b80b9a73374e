"""The README's example, run as it is printed there."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[3] / "README.md"


def printed_example() -> str:
    """The Python block of the section "From PyTorch"."""
    section = README.read_text().split("## From PyTorch\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found, "the section has no Python block"
    return found[1]


def test_the_example_computes_an_expert_layer():
    tokens, topk, num_experts, hidden, intermediate = 7, 2, 5, 16, 24
    weights, expert_ids = torch.randn(tokens, num_experts).softmax(-1).topk(topk)
    X = torch.randn(tokens, hidden, requires_grad=True)
    W1, W2 = torch.randn(num_experts, intermediate, hidden), torch.randn(num_experts, hidden, intermediate)
    act = torch.nn.functional.silu
    names = {"expert_ids": expert_ids, "weights": weights, "num_experts": num_experts, "topk": topk}
    names |= {"X": X, "W1": W1, "W2": W2, "act": act}
    exec(compile(printed_example(), str(README), "exec"), names)
    expected = torch.stack(
        [
            sum(w * (W2[e] @ act(W1[e] @ x)) for w, e in zip(ws, es, strict=True))
            for x, ws, es in zip(X, weights, expert_ids, strict=True)
        ]
    )
    torch.testing.assert_close(names["out"], expected, rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(names["out"].sum(), X)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), X)[0], rtol=1e-4, atol=1e-4)
