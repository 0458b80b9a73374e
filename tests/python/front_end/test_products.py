"""Forward and gradients against the float64 reference, over every flag, dtype and subset of inputs."""

import itertools

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from reference import Case, Results, assert_close, magnitudes, reference_results
from torch.utils.checkpoint import checkpoint

SUBSETS = list(itertools.product([False, True], repeat=3))


def run(case: Case, dY: torch.Tensor, need_x: bool = True, need_w: bool = True, need_weights: bool = True) -> Results:
    X = case.X.detach().requires_grad_(need_x)
    W = case.W.detach().requires_grad_(need_w)
    weights = case.topk_weights
    if weights is not None:
        weights = weights.detach().requires_grad_(need_weights)
    Y = moegemm.grouped_gemm(**{**case.arguments(), "X": X, "W": W, "topk_weights": weights})
    if Y.requires_grad:
        Y.backward(dY)
    return Results(Y.detach(), X.grad, W.grad, None if weights is None else weights.grad)


def check(case: Case, got: Results, dY: torch.Tensor) -> None:
    expected, size = reference_results(case, dY), magnitudes(case, dY)
    _, n, k = case.W.shape
    assert_close("Y", got.Y, expected.Y, size.Y, k)
    if got.dX is not None:
        # Each of a token's rows is rounded before they are summed; a weight adds one more rounding.
        roundings = 2 if case.permute_x or case.fuse_mul_post else 1
        assert_close("dX", got.dX, expected.dX, size.dX, n, roundings)
    if got.dW is not None:
        assert_close("dW", got.dW, expected.dW, size.dW, case.rows, case.dw_roundings)
    if got.d_weights is not None:
        # The product is rounded to X's dtype before its dot with X.
        unit = torch.finfo(case.X.dtype).eps / torch.finfo(got.d_weights.dtype).eps
        assert_close(
            "d topk_weights", got.d_weights, expected.d_weights, size.d_weights, n + k, 1 + max(unit, 1), case.X.dtype
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_gradient_matches_the_reference(device, flags, index_dtype, dtype):
    case = make_case(device, flags, dtype, index_dtype)
    dY = torch.randn(case.rows, 24, device=device).to(dtype)
    check(case, run(case, dY), dY)


@pytest.mark.parametrize("need", SUBSETS, ids=lambda n: "".join("xwt"[i] if v else "-" for i, v in enumerate(n)))
@pytest.mark.parametrize("flags", FLAGS)
def test_every_subset_of_inputs_gets_exactly_its_gradients(device, flags, need):
    case = make_case(device, flags, torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    got = run(case, dY, *need)
    assert (got.dX is not None, got.dW is not None) == need[:2]
    assert (got.d_weights is not None) == (need[2] and case.fuse_mul_post)
    check(case, got, dY)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_topk_weights_may_have_either_dtype(device, weights_dtype):
    case = make_case(device, "permute_y_mul", torch.bfloat16, weights_dtype=weights_dtype)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    got = run(case, dY)
    assert got.d_weights.dtype == weights_dtype
    check(case, got, dY)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 0},
        {"tokens": 1, "topk": 1, "experts": 1, "n": 1, "k": 1},
        {"tokens": 3, "topk": 5, "experts": 7},
        {"n": 7, "k": 13},
        {"n": 1, "k": 64},
        {"tokens": 40, "experts": 300},
    ],
    ids=str,
)
def test_any_size_works(device, flags, shape):
    case = make_case(device, flags, torch.bfloat16, **shape)
    dY = torch.randn(case.rows, case.W.shape[1], device=device).bfloat16()
    check(case, run(case, dY), dY)


@pytest.mark.parametrize("flags", FLAGS)
def test_all_rows_on_one_expert(device, flags):
    case = make_case(device, flags, expert_ids=torch.full((13, 2), 3))
    dY = torch.randn(case.rows, 24, device=device)
    got = run(case, dY)
    check(case, got, dY)
    assert not got.dW[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("flags", FLAGS)
def test_rows_of_no_expert_are_zero_and_add_nothing(device, flags):
    case = make_case(device, flags, torch.bfloat16, unrouted=6)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    got = run(case, dY)
    check(case, got, dY)
    total = int(case.m_sizes.sum())
    stray = case.gather_indices[total:].long() if case.permute_y else torch.arange(total, case.rows, device=device)
    assert not got.Y[stray].any()


def test_flattened_weights_give_the_same_bits(device):
    case = make_case(device, "permute_x", torch.bfloat16)
    dY = torch.randn(case.rows, 24, device=device).bfloat16()
    stacked = run(case, dY)
    flat = case.W.detach().reshape(-1, 40).requires_grad_()
    Y = moegemm.grouped_gemm(**{**case.arguments(), "W": flat})
    Y.backward(dY)
    assert torch.equal(Y, stacked.Y)
    assert flat.grad.shape == flat.shape
    assert torch.equal(flat.grad.view(stacked.dW.shape), stacked.dW)


@pytest.mark.parametrize("need_x", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_plain_call_finds_the_shape_of_flattened_weights(device, need_x, checkpointed):
    X, W = torch.randn(8, 16, device=device, requires_grad=need_x), torch.randn(4, 8, 16, device=device)
    m_sizes = torch.tensor([2, 3, 0, 3], device=device)
    gradients = []
    for w in (W, W.flatten(0, 1)):
        w = w.clone().requires_grad_()
        if checkpointed:
            Y = checkpoint(moegemm.grouped_gemm, X, w, m_sizes, 1, use_reentrant=False)
        else:
            Y = moegemm.grouped_gemm(X, w, m_sizes, 1)
        Y.sum().backward()
        assert w.grad.shape == w.shape
        gradients.append(w.grad.flatten())
    assert torch.equal(*gradients)


def test_a_row_does_not_depend_on_the_other_rows(device):
    case = make_case(device, dtype=torch.bfloat16, tokens=40, topk=1)
    whole = moegemm.grouped_gemm(**case.arguments())
    start = 0
    for expert, size in enumerate(case.m_sizes.tolist()):
        if size:
            alone = torch.zeros_like(case.m_sizes)
            alone[expert] = 1
            one = moegemm.grouped_gemm(case.X[start : start + 1], case.W, alone, 1)
            assert torch.equal(one[0], whole[start])
        start += size


def test_gradients_match_finite_differences(device):
    """The product is linear in each argument, so in fp32 the central difference has only rounding errors."""
    case = make_case(device, "permute_y_mul", tokens=4, k=6, n=5, experts=3)
    dY = torch.randn(case.rows, 5, device=device)
    got = run(case, dY)
    for name, gradient in (("X", got.dX), ("W", got.dW), ("topk_weights", got.d_weights)):
        value = getattr(case, name)
        direction = torch.randn_like(value)
        ends = [
            moegemm.grouped_gemm(**{**case.arguments(), name: value + sign * 0.5 * direction}).double()
            for sign in (1, -1)
        ]
        numeric = ((ends[0] - ends[1]) * dY).sum()
        assert torch.isclose(numeric, (gradient.double() * direction).sum(), rtol=1e-4, atol=1e-4), name
