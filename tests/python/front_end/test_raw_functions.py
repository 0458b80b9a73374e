"""grouped_gemm_forward, _dX and _dW: every flag, out, out_dtype, accumulate and manual configs."""

import warnings

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from moegemm import KernelConfigForward
from moegemm.operators import shortcuts
from raw_calls import RAW, raw_call
from reference import assert_close, magnitudes, reference_results


@pytest.mark.parametrize("flags", FLAGS)
def test_raw_products_match_the_reference(device, flags):
    case = make_case(device, flags, torch.bfloat16)
    named = {"permute_x": case.permute_x, "permute_y": case.permute_y, "fuse_mul_post": case.fuse_mul_post}
    named["topk_weights"] = case.topk_weights
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    expected, size = reference_results(case, dY), magnitudes(case, dY)
    Y = moegemm.grouped_gemm_forward(case.X, case.W, 2, case.m_sizes, case.gather_indices, **named)
    assert_close("Y", Y, expected.Y, size.Y, 40)
    dW = moegemm.grouped_gemm_dW(case.X, dY, case.m_sizes, case.gather_indices, 2, **named)
    assert_close("dW", dW, expected.dW, size.dW, case.rows, case.dw_roundings)
    dX = moegemm.grouped_gemm_dX(dY, case.W, case.gather_indices, case.m_sizes, 2, **named)
    assert dX.shape == (case.rows, 40)
    if case.permute_x:
        dX = dX.view(-1, 2, 40).float().sum(1).bfloat16()
    assert_close("dX", dX, expected.dX, size.dX, 24, 2 if case.permute_x else 1)


@pytest.mark.parametrize("flags", FLAGS)
def test_out_receives_the_same_bits(device, flags):
    case = make_case(device, flags, torch.bfloat16)
    named = {"permute_x": case.permute_x, "permute_y": case.permute_y, "fuse_mul_post": case.fuse_mul_post}
    named["topk_weights"] = case.topk_weights
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    calls = {
        "Y": lambda **o: moegemm.grouped_gemm_forward(
            case.X, case.W, 2, case.m_sizes, case.gather_indices, **named, **o
        ),
        "dX": lambda **o: moegemm.grouped_gemm_dX(dY, case.W, case.gather_indices, case.m_sizes, 2, **named, **o),
        "dW": lambda **o: moegemm.grouped_gemm_dW(case.X, dY, case.m_sizes, case.gather_indices, 2, **named, **o),
    }
    for name, call in calls.items():
        expected = call()
        poisoned = torch.full_like(expected, float("nan"))
        assert call(out=poisoned) is poisoned
        assert torch.equal(poisoned, expected), name
        wide = call(out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert torch.equal(wide.bfloat16(), expected), name


def test_accumulate_adds_in_fp32(device):
    case = make_case(device, "permute_x", torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    arguments = (case.X, dY, case.m_sizes, case.gather_indices, 2)
    once = moegemm.grouped_gemm_dW(*arguments, permute_x=True, out_dtype=torch.float32)
    start = torch.randn(5, 24, 40, device=device)
    total = start.clone()
    moegemm.grouped_gemm_dW(*arguments, permute_x=True, out=total, accumulate=True)
    torch.testing.assert_close(total, start + once)
    flat = start.clone().view(-1, 40)
    moegemm.grouped_gemm_dW(*arguments, permute_x=True, out=flat, accumulate=True)
    assert torch.equal(flat.view(total.shape), total)


def test_a_config_that_is_not_compiled_warns_once(device):
    case = make_case(device, dtype=torch.bfloat16)
    # A tile that no backend has, and that no other test asks for.
    config = KernelConfigForward(BLOCK_SIZE_M=48, BLOCK_SIZE_N=56 if device == "cpu" else 40, BLOCK_SIZE_K=72)
    expected = moegemm.grouped_gemm(**case.arguments())
    torch.ops.moegemm.take_notes()  # what tests of the bare operators left
    with pytest.warns(UserWarning, match=r"moegemm: asked for .*48.*nearest kernel is") as caught:
        first = moegemm.grouped_gemm(**case.arguments(), kernel_config_fwd=config)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = moegemm.grouped_gemm(**case.arguments(), kernel_config_fwd=config)
    with pytest.warns(UserWarning, match=r"asked for .*4[67].*nearest kernel is") as caught:
        moegemm.grouped_gemm_forward(case.X, case.W, 2, case.m_sizes, BLOCK_SIZE_M=47 if device == "cpu" else 46)
    assert caught[0].filename == __file__
    # Batch invariance: the kernel does not change a row's bits.
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_default_block_arguments_mean_that_the_planner_chooses(device):
    case = make_case(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moegemm.grouped_gemm_forward(case.X, case.W, 2, case.m_sizes, num_warps=8, flatten=False, autotune=True)


UNSET = dict.fromkeys(["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"])


@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", RAW)
def test_no_block_sizes_mean_that_the_planner_chooses(device, name, flags, autotune):
    case = make_case(device, flags, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = raw_call(name, case, **UNSET, autotune=autotune)
        raw_call(name, case, BLOCK_SIZE_M=None, BLOCK_SIZE_K=32, autotune=autotune)
    if name == "grouped_gemm_dW":  # of all kernels, those of dW may sum in another order
        torch.testing.assert_close(got, raw_call(name, case), rtol=2**-7, atol=2**-7)
    else:
        assert torch.equal(got, raw_call(name, case))


def test_a_config_of_nothing_is_no_config(device, monkeypatch):
    case = make_case(device, dtype=torch.bfloat16)
    seen = []
    forward = shortcuts._forward

    def spy(*arguments):
        seen.append(arguments[7])
        return forward(*arguments)

    monkeypatch.setattr(shortcuts, "_forward", spy)
    configs = [KernelConfigForward(**UNSET), KernelConfigForward(**{**UNSET, "BLOCK_SIZE_N": 64})]
    expected = moegemm.grouped_gemm(**case.arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no kernel needs to have exactly 64 columns
        for config in configs:
            assert torch.equal(moegemm.grouped_gemm(**case.arguments(), kernel_config_fwd=config), expected)
    assert seen == [None, None, [0, 64, 0, 0, 0, 0, 0]]
    fields = (configs[0].BLOCK_SIZE_M, configs[0].num_warps, configs[0].num_stages)
    assert fields == (None, None, None)
    gradients = moegemm.KernelConfigBackward_dX(**UNSET), moegemm.KernelConfigBackward_dW(**UNSET)
    X = case.X.requires_grad_()
    moegemm.grouped_gemm(
        **{**case.arguments(), "X": X}, kernel_config_fwd=configs[0], kernel_config_bwd_dX=gradients[0],
        kernel_config_bwd_dW=gradients[1], autotune=True,
    ).sum().backward()  # fmt: skip
    assert X.grad is not None


def test_threads_come_from_torch():
    """The pool is torch's: with one torch thread no other thread takes part."""
    case = make_case(tokens=600, k=256, n=256, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(moegemm.grouped_gemm(**case.arguments()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_info_names_backends_and_kernels():
    described = moegemm.info()
    assert described["torch"] == torch.__version__
    assert {"cpu", "reference"} <= {b["name"] for b in described["backends"] if b["available"]}
    assert described["kernels"]
    assert bool(described["gpus"]) != bool(described["why_no_gpu"])
