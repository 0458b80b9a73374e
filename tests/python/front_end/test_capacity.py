"""route and combine where rows are a capacity, and products whose indices are of any length."""

import moegemm
import pytest
import torch


def compact_reference(ids: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, ...]:
    flat = ids.reshape(-1)
    order = [i for e in range(experts) for i in (flat == e).nonzero().view(-1).tolist()][:capacity]
    positions = torch.full((flat.numel(),), -1)
    positions[order] = torch.arange(len(order))
    sizes = torch.bincount(flat[order], minlength=experts)
    return sizes, torch.tensor(order + [-1] * (capacity - len(order))), positions.view(ids.shape)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("capacity", [0, 7, 60, 500])
@pytest.mark.parametrize("topk", [1, 8])
def test_ids_of_others_take_no_row(device, topk, capacity, dtype):
    ids = torch.randint(-3, 40, (50, topk), device=device, dtype=dtype)
    got = moegemm.route(ids, 12, dtype=dtype, return_inverse=True, max_rows=capacity)
    for mine, expected in zip(got, compact_reference(ids.cpu().long(), 12, capacity), strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine.cpu().long(), expected.long())


def test_num_tokens_alone_keeps_room_for_every_slot(device):
    ids = torch.randint(4, (6, 2), device=device)
    sizes, order, positions = moegemm.route(
        ids, 4, return_inverse=True, num_tokens=torch.tensor([2], device=device, dtype=torch.int32)
    )
    assert (sizes.sum(), order.numel()) == (4, 12)
    assert (positions[2:] == -1).all()
    assert (order[4:] == -1).all()


def rows_and_positions(device, dtype=torch.float32):
    positions = torch.tensor([[3, -1], [0, 5], [-1, 9], [2, 1]], device=device)
    rows = torch.randn(6, 20, device=device).to(dtype)
    rows[4] = torch.nan  # nobody names it
    return rows, torch.rand(4, 2, device=device), positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_combine_by_position_is_combine_of_the_same_rows(device, dtype, weighted):
    rows, weights, positions = rows_and_positions(device, dtype)
    weights = weights if weighted else None
    inside = (positions >= 0) & (positions < 6)
    flat = torch.where(inside.view(-1, 1), rows[positions.clamp(0, 5).view(-1)], 0)
    got = moegemm.combine(rows, weights, positions=positions.to(torch.int32))
    assert torch.equal(got, moegemm.combine(flat, weights, 2))
    exact = moegemm.combine(rows, weights, positions=positions, out_dtype=torch.float32)
    assert torch.equal(exact, moegemm.combine(flat, weights, 2, out_dtype=torch.float32))


def test_gradients_of_combine_by_position(device):
    rows, weights, positions = rows_and_positions(device)
    d_out = torch.randn(4, 20, device=device)
    leaves = [rows.requires_grad_(), weights.requires_grad_()]
    d_rows, d_weights = torch.autograd.grad(moegemm.combine(rows, weights, positions=positions), leaves, d_out)
    expected_rows, expected_weights = torch.zeros_like(rows), torch.zeros_like(weights)
    for t, s in ((0, 0), (1, 0), (1, 1), (3, 0), (3, 1)):
        expected_rows[positions[t, s]] = weights[t, s] * d_out[t]
        expected_weights[t, s] = rows[positions[t, s]] @ d_out[t]
    assert torch.equal(d_rows, expected_rows)
    assert torch.allclose(d_weights, expected_weights, atol=1e-5)
    assert not d_rows[4].any()


@pytest.mark.parametrize(("tokens", "count"), [(0, 3), (3, 0), (0, 0)])
def test_combine_by_position_of_nothing(device, tokens, count):
    rows = torch.randn(count, 5, device=device, requires_grad=True)
    weights = torch.rand(tokens, 2, device=device, requires_grad=True)
    out = moegemm.combine(rows, weights, positions=torch.full((tokens, 2), -1, device=device))
    out.sum().backward()
    assert out.shape == (tokens, 5)
    assert not any(t.any() for t in (out, rows.grad, weights.grad))


def test_combine_by_position_has_second_derivatives():
    rows, weights, positions = rows_and_positions("cpu", torch.float32)
    rows = torch.randn(6, 3, requires_grad=True)
    weights = weights.requires_grad_()
    call = lambda r, w: moegemm.combine(r, w, positions=positions).square().sum()  # noqa: E731
    assert torch.autograd.gradcheck(call, (rows, weights), eps=1e-2, atol=2e-2, rtol=2e-2)
    assert torch.autograd.gradgradcheck(call, (rows, weights), eps=1e-2, atol=5e-2, rtol=5e-2)


def test_functional_gradients_of_combine_by_position():
    rows, weights, positions = rows_and_positions("cpu")
    call = lambda r, w: moegemm.combine(r, w, positions=positions).square().sum()  # noqa: E731
    expected = torch.autograd.grad(call(rows.requires_grad_(), weights.requires_grad_()), (rows, weights))
    got = torch.func.grad(call, (0, 1))(rows.detach(), weights.detach())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    with pytest.raises(NotImplementedError, match=r"moegemm\.combine cannot be vmapped"):
        torch.func.vmap(lambda r: call(r, weights))(rows.expand(3, -1, -1))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positions": torch.zeros(4)}, ValueError, r"positions is \[4\], topk is None; positions must be \[T, topk\]"),
        ({"positions": torch.zeros(4, 2)}, TypeError, r"positions has dtype fp32; accepted are int32 and int64"),
        ({"positions": [[1, 2]]}, TypeError, r"positions is .* of type list; a torch\.Tensor is accepted"),
        ({"topk": 3}, ValueError, r"positions is \[4, 2\], topk is 3"),
        ({"rows": None, "out_dtype": torch.bfloat16}, TypeError, r"rows is None; a torch\.Tensor is accepted"),
        ({"weights": torch.ones(4, 3)}, ValueError, r"weights is fp32\[4, 3\].*\[T, topk\] with M = 8 and topk = 2"),
    ],
    ids=str,
)
def test_refusals_of_combine_by_position(change, error, message):
    rows, weights, positions = rows_and_positions("cpu")
    with pytest.raises(error, match=message):
        moegemm.combine(**{"rows": rows, "weights": weights, "positions": positions, **change})


@pytest.mark.parametrize("capacity", [0, 9, 300])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_product_takes_indices_of_any_length(device, dtype, topk, capacity):
    ids = torch.randint(-2, 9, (30, topk), device=device)
    m_sizes, indices, positions = moegemm.route(ids, 5, return_inverse=True, max_rows=capacity)
    X = torch.randn(30, 32, device=device).to(dtype).requires_grad_()
    W = (torch.randn(5, 24, 32, device=device) * 0.2).to(dtype).requires_grad_()
    Y = moegemm.grouped_gemm(X, W, m_sizes, topk, indices, permute_x=True)
    assert Y.shape == (capacity, 24)
    dY = torch.randn_like(Y)
    dX, dW = torch.autograd.grad(Y, (X, W), dY)
    kept = positions.view(-1) >= 0
    flat = torch.where(kept, ids.view(-1), -1)
    sizes, order = moegemm.route(flat.view(-1, topk), 5)
    plain = moegemm.grouped_gemm(X, W, sizes, topk, order, permute_x=True)
    rows = int(kept.sum())
    assert torch.equal(Y[:rows], plain[:rows])
    assert not Y[rows:].any()
    d_plain = torch.zeros_like(plain)
    d_plain[:rows] = dY[:rows]
    expected_dX, expected_dW = torch.autograd.grad(plain, (X, W), d_plain)
    assert torch.equal(dX, expected_dX)
    assert torch.allclose(dW.float(), expected_dW.float(), rtol=0.02, atol=0.02)


def test_raw_dx_writes_as_many_flat_rows_as_out_has(device):
    ids = torch.randint(-1, 5, (12, 2), device=device)
    m_sizes, indices = moegemm.route(ids, 5, max_rows=20)
    dY, W = torch.randn(20, 24, device=device), torch.randn(5, 24, 32, device=device)
    out = torch.full((24, 32), torch.nan, device=device)
    moegemm.grouped_gemm_dX(dY, W, indices, m_sizes, 2, permute_x=True, out=out)
    in_order = moegemm.grouped_gemm_dX(dY, W, None, m_sizes, 2)
    named = indices[indices >= 0].long()
    assert torch.equal(out[named], in_order[: len(named)])
    out[named] = 0
    assert not out.any()
    with pytest.raises(ValueError, match=r"out is fp32\[23, 32\]"):
        moegemm.grouped_gemm_dX(dY, W, indices, m_sizes, 2, permute_x=True, out=out[:23])


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("capacity", [20, 40])
def test_raw_forward_writes_as_many_flat_rows_as_out_has(device, capacity, multiply):
    ids = torch.randint(-1, 5, (12, 2), device=device)
    m_sizes, indices = moegemm.route(ids, 5, max_rows=capacity)
    X, W = torch.randn(capacity, 32, device=device), torch.randn(5, 24, 32, device=device)
    weights = torch.rand(12, 2, device=device) if multiply else None
    options = {"permute_y": True, "topk_weights": weights, "fuse_mul_post": multiply}
    out = torch.full((24, 24), torch.nan, device=device)
    moegemm.grouped_gemm_forward(X, W, 2, m_sizes, indices, **options, out=out)
    in_order = moegemm.grouped_gemm_forward(X, W, 2, m_sizes)
    named = indices[indices >= 0].long()
    expected = in_order[: len(named)]
    if weights is not None:
        expected = expected * weights.view(-1)[named].unsqueeze(1)
    assert torch.equal(out[named], expected)
    out[named] = 0
    assert not out.any()
    with pytest.raises(ValueError, match=r"out is fp32\[23, 24\]"):
        moegemm.grouped_gemm_forward(X, W, 2, m_sizes, indices, **options, out=out[:23])


def test_ids_of_one_dimension_are_refused_before_anything_is_made():
    """Positions of as many rows as columns would be 4 TB."""
    with pytest.raises(ValueError, match=r"expert_ids is int32\[1048576\] on cpu; its shape must be \[T, topk\]"):
        moegemm.route(torch.zeros(2**20, dtype=torch.int32), 4, max_rows=8)
