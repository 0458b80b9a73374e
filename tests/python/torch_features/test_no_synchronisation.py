"""No call waits for the GPU, and none minds which device is the current one.

The calls that do synchronise say so: check=True, tune, load_kernels, and autotune=True while it measures.
"""

import pytest
import torch
from conftest import NO_CUDA
from public_calls import PUBLIC_CALLS

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices")


@NO_CUDA
@pytest.mark.parametrize("name", PUBLIC_CALLS)
def test_nothing_synchronises(name):
    """As far as torch can tell: what it knows of are its own copies and waits."""
    step = PUBLIC_CALLS[name]("cuda")
    expected = step()  # loads kernels and fills torch's allocator
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@NO_CUDA
@pytest.mark.parametrize("name", PUBLIC_CALLS)
def test_everything_can_be_captured(name):
    """What waits for the GPU by any means breaks a capture."""
    step = PUBLIC_CALLS[name]("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for result in captured:
        result.detach().fill_(-1)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@TWO_GPUS
@pytest.mark.parametrize("name", PUBLIC_CALLS)
def test_the_current_device_need_not_be_that_of_the_tensors(name):
    results = []
    for current, place in (("cuda:1", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:0", "cuda:0")):
        with torch.cuda.device(current):
            torch.manual_seed(0)
            found = PUBLIC_CALLS[name](place)()
            assert all(t.device == torch.device(place) for t in found)
            assert torch.cuda.current_device() == torch.device(current).index
            results.append([t.cpu() for t in found])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
