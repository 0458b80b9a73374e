"""What the layer promises about the launches of its two products, and when it does not."""

import torch
from moegemm.expert_layer.function import _nothing_between
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
    assert _nothing_between(weight, None, torch.zeros(2))
    assert _nothing_between(Packed(torch.zeros(2), torch.zeros(2), "mxfp4"), None, None)


def test_a_tensor_subclass_may_launch_something_between_the_products():
    wrapped = torch.zeros(2, 3).as_subclass(Wrapped)
    assert not _nothing_between(wrapped, None, None)
    assert not _nothing_between(torch.zeros(2), wrapped, None)
    assert not _nothing_between(Packed(torch.zeros(2), wrapped, "mxfp4"), None, None)


def test_a_dispatch_mode_may_launch_something_between_the_products():
    with Watching():
        assert not _nothing_between(torch.zeros(2), None, None)


def test_a_compiler_may_put_a_cast_between_the_products():
    @torch.compile(fullgraph=True, backend="eager")
    def asked(weight: Tensor) -> Tensor:
        return weight + 1 if _nothing_between(weight) else weight - 1

    assert asked(torch.zeros(2)).tolist() == [-1, -1]
