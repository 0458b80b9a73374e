"""Strides: rows that can be walked are used in place, everything else is copied, nothing is misread."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case


def strided_rows(t):
    return torch.empty(t.shape[0], t.shape[1] + 5, dtype=t.dtype, device=t.device)[:, : t.shape[1]].copy_(t)


def offset(t):
    storage = torch.empty(t.numel() + 3, dtype=t.dtype, device=t.device)
    return storage[3:].view(t.shape).copy_(t)


def column_major(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def every_second_column(t):
    wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
    return wide[..., ::2].copy_(t)


def padded_experts(t):
    return torch.empty(t.shape[0], t.shape[1] + 2, t.shape[2], dtype=t.dtype, device=t.device)[:, :-2].copy_(t)


def negated_view(t):
    return torch._neg_view(-t)


LAYOUTS = [strided_rows, offset, column_major, every_second_column, negated_view]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("flags", FLAGS)
def test_x_and_dy_may_have_any_strides(device, flags, layout):
    case = make_case(device, flags, torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    results = []
    for arrange in (torch.Tensor.contiguous, layout):
        X = arrange(case.X).detach().requires_grad_()
        W = case.W.detach().requires_grad_()
        Y = moegemm.grouped_gemm(**{**case.arguments(), "X": X, "W": W})
        results.append([Y, *torch.autograd.grad(Y, [X, W], arrange(dY))])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("layout", [column_major, every_second_column, padded_experts], ids=lambda f: f.__name__)
def test_w_may_have_any_strides(device, layout):
    case = make_case(device, "permute_x", torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    results = []
    for W in (case.W, layout(case.W)):
        X = case.X.detach().requires_grad_()
        Y = moegemm.grouped_gemm(**{**case.arguments(), "X": X, "W": W})
        results.append([Y, *torch.autograd.grad(Y, X, dY)])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_expanded_inputs(device):
    case = make_case(device, dtype=torch.bfloat16)
    X = case.X[:1].expand(26, -1)
    assert torch.equal(
        moegemm.grouped_gemm(X, case.W, case.m_sizes, 2), moegemm.grouped_gemm(X.clone(), case.W, case.m_sizes, 2)
    )
    W = case.W[:1].expand(5, -1, -1)
    assert torch.equal(
        moegemm.grouped_gemm(case.X, W, case.m_sizes, 2), moegemm.grouped_gemm(case.X, W.clone(), case.m_sizes, 2)
    )


def test_overlapping_rows(device):
    case = make_case(device)
    X = torch.randn(200, device=device).as_strided((26, 40), (5, 1))
    assert torch.equal(
        moegemm.grouped_gemm(X, case.W, case.m_sizes, 2), moegemm.grouped_gemm(X.clone(), case.W, case.m_sizes, 2)
    )


def test_strided_routing_tensors(device):
    case = make_case(device, "permute_y_mul")
    expected = moegemm.grouped_gemm(**case.arguments())
    case.m_sizes = every_second_column(case.m_sizes)
    case.gather_indices = every_second_column(case.gather_indices)
    case.topk_weights = column_major(case.topk_weights)
    assert torch.equal(moegemm.grouped_gemm(**case.arguments()), expected)
    case.topk_weights = strided_rows(case.topk_weights)
    assert torch.equal(moegemm.grouped_gemm(**case.arguments()), expected)


def test_rows_apart_are_read_in_place(device):
    """A copy would not see later changes: the operator must read the rows where they are."""
    case = make_case(device, dtype=torch.bfloat16)
    X = strided_rows(case.X)
    if device == "cpu":
        before = torch.empty(26, 24, dtype=torch.bfloat16)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            moegemm.grouped_gemm_forward(X, case.W, 2, case.m_sizes, out=before)
        names = {event.name for event in profile.events()}
        assert "moegemm::forward_out" in names
        assert not names & {"aten::contiguous", "aten::clone", "aten::copy_"}


def test_out_may_be_a_slice(device):
    case = make_case(device, dtype=torch.bfloat16)
    wide = torch.full((26, 40), 7.0, dtype=torch.bfloat16, device=device)
    result = moegemm.grouped_gemm_forward(case.X, case.W, 2, case.m_sizes, out=wide[:, 8:32])
    assert result.data_ptr() == wide[:, 8:].data_ptr()
    assert torch.equal(wide[:, 8:32], moegemm.grouped_gemm_forward(case.X, case.W, 2, case.m_sizes))
    assert (wide[:, :8] == 7).all()
    assert (wide[:, 32:] == 7).all()
