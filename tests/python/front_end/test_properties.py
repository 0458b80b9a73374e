"""Random sizes, routings and flags: hypothesis looks for the case nobody thought of."""

import os

import moegemm
import torch
from conftest import FLAGS, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_products import check, run

QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize="CI" in os.environ,  # the same cases each time in CI, new ones elsewhere
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# Around one vector and a few, and several steps and tiles of every instruction set with a remainder.
WIDTHS = st.integers(1, 35) | st.sampled_from([64, 127, 128, 200, 257])


@st.composite
def routings(draw):
    """[T, topk] expert ids, some of them on other ranks, and the number of experts here."""
    experts = draw(st.integers(1, 9))
    topk = draw(st.integers(1, 4))
    tokens = draw(st.integers(0, 12))
    ids = draw(st.lists(st.integers(-1, experts - 1), min_size=tokens * topk, max_size=tokens * topk))
    return torch.tensor(ids, dtype=torch.int64).view(tokens, topk), experts


@QUICK
@given(
    routing=routings(),
    flags=st.sampled_from(list(FLAGS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    n=WIDTHS,
    k=WIDTHS,
    seed=st.integers(0, 2**31),
)
def test_any_call_matches_the_reference(device, routing, flags, dtype, index_dtype, n, k, seed):
    torch.manual_seed(seed)
    ids, experts = routing
    tokens, topk = ids.shape
    case = make_case(
        device, flags, dtype, index_dtype, tokens=tokens, topk=topk, experts=experts, n=n, k=k, expert_ids=ids
    )
    dY = torch.randn(case.rows, n, device=device).to(dtype)
    check(case, run(case, dY), dY)


@QUICK
@given(routing=routings(), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_any_routing_sorts_stably(device, routing, dtype):
    ids, experts = routing
    m_sizes, gather_indices, inverse = moegemm.route(ids.to(device), experts, dtype=dtype, return_inverse=True)
    flat = ids.reshape(-1)
    expected = torch.where(flat < 0, experts, flat).sort(stable=True).indices
    assert torch.equal(gather_indices.cpu().long(), expected)
    assert m_sizes.tolist() == [int((flat == e).sum()) for e in range(experts)]
    assert torch.equal(inverse.cpu()[expected].long(), torch.arange(len(flat)))


@QUICK
@given(
    sizes=st.lists(st.integers(-2, 5) | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6),
    index=st.lists(st.integers(-2, 9) | st.integers(-(2**31), 2**31 - 1), min_size=8, max_size=8),
    flags=st.sampled_from(list(FLAGS)),
)
def test_garbage_routing_is_harmless(device, sizes, index, flags):
    """Results are defined and finite whatever the device memory holds."""
    dtype, n, k = (torch.bfloat16, 8, 16) if device == "cuda" else (torch.float32, 5, 6)
    case = make_case(device, flags, dtype, tokens=4, experts=len(sizes), n=n, k=k)
    case.m_sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
    if case.gather_indices is not None:
        case.gather_indices = torch.tensor(index, dtype=torch.int32, device=device)
    dY = torch.randn(case.rows, n, device=device).to(dtype)
    got = run(case, dY)
    for result in (got.Y, got.dX, got.dW, got.d_weights):
        assert result is None or torch.isfinite(result).all()
