"""Segments that begin at multiples of a capacity, of sizes that stay on their device."""

import moegemm
import pytest
import torch
from moegemm.operators import segments
from moegemm.operators.segments import masked
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", [0, 4, 7])
def test_masked_segments_begin_at_multiples_of_the_capacity(device, capacity, dtype):
    sizes = torch.tensor([3, 9, 0, -2, 4], device=device, dtype=dtype)
    for _ in range(2):  # made, and kept
        found = masked(sizes, capacity)
        assert found.dtype == dtype
        assert found.tolist() == [[min(n, capacity) for n in sizes.tolist()], [e * capacity for e in range(5)]]


def test_masked_segments_are_right_on_every_stream(device):
    if device == "cpu":
        pytest.skip("streams are those of a GPU")
    sizes, capacity = torch.tensor([3, 9, 0, -2, 4], device=device), 137  # which no other test has kept
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        late = masked(sizes, capacity)
    with torch.cuda.stream(second):
        found = masked(sizes, capacity).cpu()
    torch.cuda.synchronize()
    assert torch.equal(found, late.cpu())
    assert found[1].tolist() == [e * capacity for e in range(5)]


def test_masked_segments_are_kept_for_each_stream(monkeypatch):
    monkeypatch.setattr(segments, "_bounds", {})
    for stream in (0, 7, 0, 7):
        monkeypatch.setattr(segments, "_stream_of", lambda _, stream=stream: stream)
        assert masked(torch.tensor([3, 9, 0]), 4).tolist() == [[3, 4, 0], [0, 4, 8]]
    assert len(segments._bounds) == 2


def test_masked_segments_begin_beyond_what_int32_counts(device):
    sizes = torch.tensor([3, 2**30], device=device, dtype=torch.int32)
    for capacity in (2**30 - 1, 2**31 - 5):
        assert masked(sizes, capacity).tolist() == [[3, min(2**30, capacity)], [0, capacity]]
    sizes = sizes.repeat(2)
    assert masked(sizes, 2**30)[1].tolist() == [0, 2**30, 2**31, 3 * 2**30]


@pytest.mark.parametrize("around", ["functionalize", "fake tensors"])
def test_a_call_inside_a_transform_leaves_nothing_to_later_calls(monkeypatch, around):
    monkeypatch.setattr(segments, "_bounds", {})
    rows, gate_up, down = torch.randn(2, 5, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    sizes = torch.tensor([2, 3])
    expected = moegemm.experts_mlp(rows, gate_up, down, sizes)
    segments._bounds.clear()
    if around == "functionalize":
        torch.func.functionalize(lambda rows: moegemm.experts_mlp(rows, gate_up, down, sizes))(rows)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            moegemm.experts_mlp(rows, gate_up, down, sizes)
    found = moegemm.experts_mlp(rows, gate_up, down, sizes)
    assert type(found) is torch.Tensor
    assert not torch._is_functional_tensor(found)
    assert torch.equal(found, expected)
