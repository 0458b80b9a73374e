"""torch's flop counter on every product: 2 M N K, M being all rows, those without an expert included."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from raw_calls import RAW, raw_call
from torch.utils.flop_counter import FlopCounterMode

M, N, K = 26, 24, 40  # of make_case
PRODUCT = 2 * M * N * K


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("flags", FLAGS)
def test_a_product_and_its_gradients(device, flags):
    case = make_case(device, flags, unrouted=0 if flags == "permute_x" else 5)
    assert counted(lambda: moegemm.grouped_gemm(**case.arguments())) == PRODUCT
    case.X.requires_grad_()
    assert counted(lambda: moegemm.grouped_gemm(**case.arguments()).sum().backward()) == 2 * PRODUCT
    case.W.requires_grad_()
    assert counted(lambda: moegemm.grouped_gemm(**case.arguments()).sum().backward()) == 3 * PRODUCT


def test_a_plain_product_as_torch_counts_its_matrices(device):
    X, W = torch.randn(6, 16, device=device), torch.randn(3, 8, 16, device=device)
    m_sizes = torch.tensor([2, 1, 3], device=device)
    by_torch = counted(lambda: [x @ w.T for x, w in zip(X.split([2, 1, 3]), W, strict=True)])
    assert counted(lambda: moegemm.grouped_gemm(X, W, m_sizes, 1)) == by_torch
    assert counted(lambda: moegemm.grouped_gemm(X, W.flatten(0, 1), m_sizes, 1)) == by_torch


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", RAW)
def test_raw_functions(device, name, flags):
    case = make_case(device, flags)
    out = raw_call(name, case)
    assert counted(lambda: raw_call(name, case)) == PRODUCT
    assert counted(lambda: raw_call(name, case, out=out)) == PRODUCT


def test_rows_without_an_expert_count_too(device):
    case = make_case(device, "permute_y", unrouted=20)
    assert int(case.m_sizes.sum()) == 6
    assert counted(lambda: moegemm.grouped_gemm(**case.arguments())) == PRODUCT


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("where", ["device", "meta"])
def test_a_layer_and_its_gradients(device, where, transposed, bias):
    T, H, inner, E, topk = 5, 8, 6, 3, 2
    place = device if where == "device" else "meta"
    shapes = [(E, 2 * inner, H), (E, H, inner)]
    w1, w2 = (torch.randn(e, c, r) if transposed else torch.randn(e, r, c) for e, r, c in shapes)
    x, w1, w2 = torch.randn(T, H).to(place), w1.to(place), w2.to(place)
    biases = {"gate_up_bias": torch.randn(E, 2 * inner), "down_bias": torch.randn(E, H)} if bias else {}
    biases = {name: t.to(place) for name, t in biases.items()}
    ids = torch.randint(E, (T, topk)).to(place)

    def layer() -> torch.Tensor:
        return moegemm.moe_mlp(x, w1, w2, ids, None, transposed=transposed, **biases)

    forward = 2 * T * topk * (2 * inner * H + H * inner)
    assert counted(layer) == forward
    for t in (x, w1, w2):
        t.requires_grad_()
    assert counted(layer) == forward
    assert counted(lambda: layer().sum().backward()) == 3 * forward


def test_a_low_rank_part_counts_with_its_product():
    rows, experts, n, k, rank = 12, 3, 16, 24, 8
    x, w, sizes = torch.randn(rows, k), torch.randn(experts, n, k), torch.full((experts,), 4, dtype=torch.int32)
    thin, b, a = torch.randn(rows, rank), torch.randn(experts, n, rank), torch.randn(experts, rank, k)
    low_rank = torch.ops.moegemm.forward_low_rank, torch.ops.moegemm.dx_low_rank
    assert counted(lambda: low_rank[0](x, w, sizes, None, thin, b)) == 2 * rows * n * (k + rank)
    assert counted(lambda: low_rank[1](torch.randn(rows, n), w, sizes, None, thin, a)) == 2 * rows * k * (n + rank)


def test_every_operator_with_a_product_has_a_formula():
    from torch.utils.flop_counter import flop_registry

    names = {str(op).removeprefix("moegemm.") for op in flop_registry if str(op).startswith("moegemm.")}
    products = {"forward", "dx", "dw"}
    expected = products | {f"{name}_out" for name in products}
    assert names == expected | {"forward_plain", "forward_pair", "forward_low_rank", "dx_low_rank"}
