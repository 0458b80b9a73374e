"""route and combine against plain torch."""

import moegemm
import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "topk", "experts"), [(0, 2, 4), (1, 1, 1), (37, 2, 5), (500, 8, 256), (64, 3, 1000)]
)
def test_route_sorts_stably(device, tokens, topk, experts, id_dtype, dtype):
    ids = torch.randint(experts, (tokens, topk), device=device, dtype=id_dtype)
    m_sizes, gather_indices, inverse = moegemm.route(ids, experts, dtype=dtype, return_inverse=True)
    assert m_sizes.dtype == gather_indices.dtype == inverse.dtype == dtype
    flat = ids.reshape(-1).long()
    assert torch.equal(m_sizes.long(), torch.bincount(flat, minlength=experts))
    assert torch.equal(gather_indices.long(), flat.sort(stable=True).indices)
    assert torch.equal(inverse[gather_indices.long()].long(), torch.arange(tokens * topk, device=device))


def test_ids_of_other_ranks_go_behind_all_segments(device):
    ids = torch.tensor([[0, -1], [9, 1], [1, 0]], device=device)
    m_sizes, gather_indices = moegemm.route(ids, 2)
    assert m_sizes.tolist() == [2, 2]
    assert gather_indices.tolist() == [0, 5, 3, 4, 1, 2]


def test_route_reads_strided_ids(device):
    wide = torch.randint(4, (20, 6), device=device)
    for ids in (wide[:, 1:3], wide[:, ::3], wide.T[:2].T):
        assert all(torch.equal(a, b) for a, b in zip(moegemm.route(ids, 4), moegemm.route(ids.clone(), 4), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("topk", [1, 2, 8])
def test_combine_sums_in_fp32(device, dtype, weighted, topk):
    rows = torch.randn(11 * topk, 24, device=device).to(dtype)
    weights = torch.rand(11, topk, device=device) if weighted else None
    terms = rows.view(11, topk, 24).double() * (weights.unsqueeze(2) if weighted else 1)
    got = moegemm.combine(rows, weights, topk)
    assert got.dtype == dtype
    bound = torch.finfo(dtype).eps / 2 * terms.sum(1).abs() + topk * 2**-23 * terms.abs().sum(1)
    assert ((got.double() - terms.sum(1)).abs() <= bound).all()
    wide = moegemm.combine(rows, weights, topk, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), got)


def test_combine_refuses_what_it_cannot_do():
    rows = torch.randn(22, 24)
    with pytest.raises(TypeError, match="out_dtype is torch"):
        moegemm.combine(rows, topk=2, out_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"topk is None; it is needed unless weights is \[T, topk\]"):
        moegemm.combine(rows)
    positions, tangent = torch.arange(22).view(11, 2), torch.ones_like(rows)
    with pytest.raises(NotImplementedError, match="combine by position has no forward-mode derivative"):
        torch.func.jvp(lambda rows: moegemm.combine(rows, positions=positions), (rows,), (tangent,))


@pytest.mark.parametrize("shape", [(11, 2), (22,)])
def test_combine_gradients(device, shape):
    rows = torch.randn(22, 24, device=device, requires_grad=True)
    weights = torch.rand(shape, device=device, requires_grad=True)
    gradient = torch.randn(11, 24, device=device)
    got = torch.autograd.grad(moegemm.combine(rows, weights, 2), [rows, weights], gradient)
    plain = (rows.view(11, 2, 24) * weights.view(11, 2, 1)).sum(1)
    for mine, theirs in zip(got, torch.autograd.grad(plain, [rows, weights], gradient), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_combine_without_weights_has_a_gradient(device):
    rows = torch.randn(22, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    moegemm.combine(rows, topk=2).sum().backward()
    assert (rows.grad == 1).all()


def test_a_layer_equals_its_loop_over_experts(device):
    T, E, K, N, topk = 50, 6, 32, 48, 2
    x = torch.randn(T, K, device=device)
    W1, W2 = torch.randn(E, N, K, device=device) * 0.2, torch.randn(E, K, N, device=device) * 0.2
    weights, ids = torch.randn(T, E, device=device).softmax(-1).topk(topk)
    m_sizes, gather_indices = moegemm.route(ids, E)
    h = moegemm.grouped_gemm(x, W1, m_sizes, topk, gather_indices, permute_x=True)
    y = moegemm.grouped_gemm(h.relu(), W2, m_sizes, topk, gather_indices, permute_y=True, is_first_gemm=False)
    out = moegemm.combine(y, weights)
    expected = torch.zeros(T, K, device=device, dtype=torch.float64)
    for e in range(E):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        rows = (x[tokens].double() @ W1[e].double().T).relu() @ W2[e].double().T
        expected.index_add_(0, tokens, rows * weights[tokens, slots].double().unsqueeze(1))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
