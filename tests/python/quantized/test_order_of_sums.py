"""moegemm.set_batch_invariant: whether kernels may sum in another order."""

import os
import subprocess
import sys

import moegemm
import pytest


def test_the_switch_returns_what_held_before():
    assert moegemm.set_batch_invariant(False) is True
    assert moegemm.set_batch_invariant(True) is False
    with moegemm.batch_invariant(False):
        assert moegemm.set_batch_invariant(False) is False
    assert moegemm.set_batch_invariant(True) is True
    with pytest.raises(TypeError, match="on is 'no'"):
        moegemm.set_batch_invariant("no")


def test_a_block_that_fails_leaves_the_switch_as_it_was():
    with pytest.raises(RuntimeError, match="in the block"), moegemm.batch_invariant(False):
        raise RuntimeError("in the block")
    assert moegemm.set_batch_invariant(True) is True


@pytest.mark.parametrize(
    ("word", "shown"), [("0", "False"), ("1", "True"), ("", "True"), ("maybe", "accepted are 0 and 1")]
)
def test_the_environment_says_what_holds_first(word, shown):
    program = "import moegemm; print(moegemm.set_batch_invariant(True))"
    environment = {**os.environ, "MOEGEMM_BATCH_INVARIANT": word}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert shown in done.stdout + done.stderr


def test_results_have_the_same_bits_without_the_promise():
    """No kernel has an order of its own today."""
    import torch

    w = moegemm.quantize(torch.randn(3, 16, 64), "mxfp4")
    x, m_sizes = torch.randn(7, 64).bfloat16(), torch.tensor([3, 0, 4])
    expected = moegemm.grouped_gemm(x, w, m_sizes, 1)
    with moegemm.batch_invariant(False):
        for weights in (w, w.dequantize()):
            assert torch.equal(moegemm.grouped_gemm(x, weights, m_sizes, 1), expected)
