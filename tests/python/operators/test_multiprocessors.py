"""Products that leave some of a GPU to other kernels."""

import time

import moegemm
import pytest
import torch
from conftest import NO_CUDA

HELD = 20  # multiprocessors


def make_product():
    X = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    W = torch.randn(8, 768, 512, device="cuda", dtype=torch.bfloat16)
    sizes = torch.full((8,), 512, dtype=torch.int32, device="cuda")
    return lambda: moegemm.grouped_gemm(X, W, sizes, 1)


@NO_CUDA
def test_products_keep_their_bits_on_some_multiprocessors():
    product = make_product()
    before = product()
    for most in (1, 5, 112):
        with moegemm.max_multiprocessors(most):
            assert torch.equal(product(), before)


@NO_CUDA
def test_product_ends_beside_a_kernel_that_holds_the_other_multiprocessors():
    triton = pytest.importorskip("triton")
    from spinning import spin

    product = make_product()
    expected = product()
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    spin[(1,)](torch.ones_like(flag), num_warps=32)  # compiled before anything waits for it
    torch.cuda.synchronize()
    exchange, work = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(exchange):
        spin[(HELD,)](flag, num_warps=32)
    every = torch.cuda.get_device_properties(0).multi_processor_count
    with torch.cuda.stream(work), moegemm.max_multiprocessors(every - HELD):
        got = product()
        done = torch.cuda.Event()
        done.record()
    until = time.monotonic() + 20
    while not done.query() and time.monotonic() < until:
        time.sleep(0.001)
    ended = done.query()
    with torch.cuda.stream(work):
        flag.fill_(1)  # lets the other kernel end, whatever became of the product
    torch.cuda.synchronize()
    assert ended, f"the product waits for a kernel that holds {HELD} multiprocessors (triton {triton.__version__})"
    assert torch.equal(got, expected)


def test_number_of_multiprocessors_is_checked_and_put_back():
    assert moegemm.set_max_multiprocessors(7) == 0
    assert moegemm.set_max_multiprocessors(0) == 7
    with moegemm.max_multiprocessors(3):
        assert moegemm.set_max_multiprocessors(3) == 3
    assert moegemm.set_max_multiprocessors(0) == 0
    for value in (-1, 2**40):
        with pytest.raises(ValueError, match=rf"max_multiprocessors is {value}; 0 \(all\) to 2147483647 are accepted"):
            moegemm.set_max_multiprocessors(value)
    for value in ("x", None, 2.5, True):
        with pytest.raises(TypeError, match=f"max_multiprocessors is {value!r} of type .*; an int is accepted"):
            moegemm.set_max_multiprocessors(value)
    assert moegemm.set_max_multiprocessors(0) == 0
