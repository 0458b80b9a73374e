"""What the contract says about routing data that makes no sense: nothing undefined, on any device."""

import moegemm
import pytest
import torch
from conftest import make_case
from torch import Tensor

HALF = torch.bfloat16  # what the fastest kernels of each device take


def poisoned(rows: int, columns: int, device: str) -> Tensor:
    return torch.full((rows, columns), float("nan"), dtype=HALF, device=device)


def flat_outputs(case, dY: Tensor) -> list[Tensor]:
    """The results in flat order, stored into memory that held NaN: Y of permute_y and dX of permute_x."""
    indices, sizes, topk = case.gather_indices, case.m_sizes, case.topk
    rows = len(indices)
    Y, dX = poisoned(rows, dY.size(1), dY.device), poisoned(rows, case.W.size(2), dY.device)
    moegemm.grouped_gemm_forward(case.X, case.W, topk, sizes, indices, permute_y=True, out=Y)
    moegemm.grouped_gemm_dX(dY, case.W, indices, sizes, topk, permute_x=True, out=dX)
    return [Y, dX]


def expected_flat(case, dY: Tensor) -> list[Tensor]:
    """The same from results in expert order: what a valid position names, and zero elsewhere."""
    ends = case.m_sizes.clamp(min=0).cumsum(0).tolist()[-1]
    results = [
        moegemm.grouped_gemm_forward(case.X, case.W, case.topk, case.m_sizes),
        moegemm.grouped_gemm_dX(dY, case.W, None, case.m_sizes, case.topk),
    ]
    index = case.gather_indices[:ends].long()
    valid = (index >= 0) & (index < len(case.gather_indices))
    return [torch.zeros_like(rows).index_copy(0, index[valid], rows[:ends][valid]) for rows in results]


def flat_case(device: str, tokens: int = 40, topk: int = 2, n: int = 24, k: int = 40):
    case = make_case(device, "permute_y", HALF, tokens=tokens, topk=topk, n=n, k=k)
    return case, torch.randn(case.rows, n, device=device).to(HALF)


def test_row_that_no_index_names_is_zero(device):
    case, dY = flat_case(device)
    case.gather_indices[[0, 5, 33]] = torch.tensor([-1, 10**6, -7], dtype=torch.int32, device=device)
    for got, expected in zip(flat_outputs(case, dY), expected_flat(case, dY), strict=True):
        assert torch.equal(got, expected)
        assert (got == 0).all(1).sum() >= 3


@pytest.mark.parametrize("tail", [0, -1, 511, 2**31 - 1])
def test_positions_past_the_sizes_name_nothing(device, tail):
    case, dY = flat_case(device, tokens=512)
    case.m_sizes = torch.tensor([200, 312], dtype=torch.int32, device=device)
    case.W = case.W[:2]
    case.gather_indices = torch.randperm(1024, device=device).int()
    case.gather_indices[512:] = tail
    for got, expected in zip(flat_outputs(case, dY), expected_flat(case, dY), strict=True):
        assert torch.equal(got, expected)
        assert (got == 0).all(1).sum() == 512


@pytest.mark.parametrize("tokens", [600_000])
def test_unnamed_rows_among_more_than_a_million(device, tokens):
    if device == "cpu":
        pytest.skip("blocks share rows on the GPU only")
    case, dY = flat_case(device, tokens=tokens, n=8, k=8)
    case.gather_indices[::1000] = -1
    for got, expected in zip(flat_outputs(case, dY), expected_flat(case, dY), strict=True):
        assert torch.equal(got, expected)


def test_each_element_of_a_row_that_two_positions_name_is_that_of_one(device):
    case, dY = flat_case(device, tokens=200)
    case.gather_indices[100:150] = case.gather_indices[200:250]
    for number, got in enumerate(flat_outputs(case, dY)):
        alone = [0, 0]
        for which, rest in enumerate((slice(100, 150), slice(200, 250))):
            single = make_case(device, "permute_y", HALF)  # the same call with one of the two left out
            single.__dict__.update(case.__dict__)
            single.gather_indices = case.gather_indices.clone()
            single.gather_indices[rest] = -1
            alone[which] = flat_outputs(single, dY)[number]
        assert ((got == alone[0]) | (got == alone[1])).all()


@pytest.mark.parametrize("side", ["x", "dy"])
@pytest.mark.parametrize(("n", "k"), [(24, 40), (72, 4104), (4104, 72)])
def test_what_stands_opposite_an_absent_row_adds_nothing_to_dW(device, side, n, k):
    rows, topk = 96, 2
    X = torch.randn(rows // topk if side == "x" else rows, k, device=device).to(HALF)
    dY = torch.randn(rows, n, device=device).to(HALF)
    sizes = torch.tensor([40, 0, 50], dtype=torch.int32, device=device)
    indices = torch.randperm(rows, device=device).int()
    absent = [0, 17, 39, 63, 89]
    flags = {"permute_x": side == "x", "permute_y": side == "dy"}
    good = moegemm.grouped_gemm_dW(X, dY, sizes, indices, topk, **flags)
    opposite = dY if side == "x" else X
    opposite[absent] = 0  # as if the rows were not there
    without = moegemm.grouped_gemm_dW(X, dY, sizes, indices, topk, **flags)
    indices[absent] = torch.tensor([-1, rows, 2**31 - 1, -(2**31), -2], dtype=torch.int32, device=device)
    opposite[absent] = float("nan")
    opposite[90:] = float("inf")
    got = moegemm.grouped_gemm_dW(X, dY, sizes, indices, topk, **flags)
    assert not torch.equal(good, without)
    torch.testing.assert_close(got, without)


def test_check_accepts_any_index_past_the_sizes(device):
    case, _ = flat_case(device)
    case.m_sizes[-1] -= 3
    for tail in (-1, 0, 10**6):
        case.gather_indices[-3:] = tail
        moegemm.grouped_gemm(**case.arguments(), check=True)


def test_check_reports_an_index_that_stands_twice(device):
    case, _ = flat_case(device)
    case.gather_indices[30] = case.gather_indices[4]
    with pytest.raises(ValueError, match=r"gather_indices\[30\] is \d+, as gather_indices\[4\] is"):
        moegemm.grouped_gemm(**case.arguments(), check=True)


@pytest.mark.parametrize("experts", [1800, 2300, 9000])
def test_many_experts_are_handed_to_kernels_that_hold_them(device, experts):
    """On Hopper, sm90 keeps the starts of about 2000 experts in shared memory; sm80 takes over."""
    tokens, topk, n, k = 4000, 2, 16, 32
    ids = torch.randint(experts, (tokens, topk))
    case = make_case(device, "permute_x", HALF, tokens=tokens, topk=topk, experts=experts, n=n, k=k, expert_ids=ids)
    dY = torch.randn(tokens * topk, n, device=device).to(HALF)
    got = moegemm.grouped_gemm(**case.arguments(), check=True)
    rows = case.X[case.gather_indices.long() // topk].float()
    of_row = ids.view(-1).sort(stable=True).values.to(device)
    expected = torch.einsum("rk,rnk->rn", rows, case.W.float()[of_row])
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=2e-2)
    dW = moegemm.grouped_gemm_dW(case.X, dY, case.m_sizes, case.gather_indices, topk, permute_x=True)
    for expert in (0, experts // 2, experts - 1):
        of_expert = of_row == expert
        expected = dY[of_expert].float().T @ rows[of_expert]
        torch.testing.assert_close(dW[expert].float(), expected, rtol=1e-2, atol=5e-2)


def test_more_experts_than_any_gpu_kernel_holds_are_refused_with_the_reason():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    experts = 40_000
    X, W = torch.randn(16, 8, device="cuda").to(HALF), torch.randn(experts, 8, 8, device="cuda").to(HALF)
    sizes = torch.zeros(experts, dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match=r"40000 experts need \d+ bytes of shared memory, a block has \d+"):
        moegemm.grouped_gemm(X, W, sizes, 1)


def test_dW_gathers_from_an_operand_of_more_than_64_GiB():
    tokens, n, k, spare = 8_500_000, 8, 4096, 30 << 30
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < tokens * k * 2 + spare:
        pytest.skip("no GPU with 100 GiB of free memory")
    X = torch.empty(tokens, k, dtype=HALF, device="cuda").normal_()  # 65 GiB
    dY = torch.randn(tokens, n, device="cuda").to(HALF)
    sizes = torch.tensor([tokens // 3, tokens - tokens // 3], dtype=torch.int32, device="cuda")
    indices = torch.arange(tokens, device="cuda", dtype=torch.int32).flip(0)
    got = moegemm.grouped_gemm_dW(X, dY, sizes, indices, 1, permute_x=True, out_dtype=torch.float32)
    expected = torch.zeros_like(got)
    for first in range(0, tokens, 1 << 20):  # the rows are read in reverse order
        rows = X[first : first + (1 << 20)]
        of_rows = dY.flip(0)[first : first + (1 << 20)]
        last_of_expert_1 = min(max(tokens - tokens // 3 - first, 0), len(rows))
        for expert, part in ((1, slice(0, last_of_expert_1)), (0, slice(last_of_expert_1, len(rows)))):
            expected[expert] += (of_rows[part].T.float() @ rows[part].float()).to(torch.float32)
    assert ((got - expected).norm() / expected.norm()).item() < 1e-2  # sums of millions of products in fp32
