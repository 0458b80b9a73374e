"""The Unsloth-compatible interface: its signatures, and its examples with other imports (and sizes, on the CPU)."""

import inspect

import pytest
import torch
from conftest import make_case
from moegemm.interface import grouped_gemm, grouped_gemm_dW, grouped_gemm_dX, grouped_gemm_forward
from moegemm.tuning import KernelConfigBackward_dW, KernelConfigBackward_dX, KernelConfigForward

OUR_OWN = {
    "check", "out", "out_dtype", "accumulate", "allow_tf32", "topk_weights", "weight_gradients", "starts", "tails",
    "expected_rows",
}  # fmt: skip
SIGNATURES = {
    grouped_gemm: "X, W, m_sizes, topk, gather_indices=None, permute_x=False, permute_y=False, topk_weights=None, "
    "fuse_mul_post=False, kernel_config_fwd=None, kernel_config_bwd_dX=None, kernel_config_bwd_dW=None, "
    "autotune=False, is_first_gemm=True, dX_only=False, dW_only=False",
    grouped_gemm_forward: "X, W, topk, m_sizes, gather_indices=None, topk_weights=None, permute_x=False, "
    "permute_y=False, fuse_mul_post=False, autotune=False, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32, "
    "num_warps=4, num_stages=2, use_tma_load_w=False, use_tma_load_x=False, use_tma_store=False, flatten=True, "
    "debug=False",
    grouped_gemm_dX: "dY, W, gather_indices, m_sizes, topk, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32, "
    "debug=False, permute_x=False, permute_y=False, use_tma_load_w=False, use_tma_load_dy=False, "
    "use_tma_store=False, num_warps=4, num_stages=2, flatten=True, fuse_mul_pre=False, fuse_mul_post=False, "
    "autotune=False",
    grouped_gemm_dW: "X, dY, m_sizes, gather_indices, topk, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32, "
    "permute_x=False, permute_y=False, use_tma_load_dy=False, use_tma_load_x=False, use_tma_store=False, "
    "fuse_mul_pre=False, fuse_mul_post=False, num_warps=4, num_stages=2, flatten=True, autotune=False, debug=False",
}
SHARED_FIELDS = {
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "flatten",
    "permute_x", "permute_y", "fuse_mul_post", "use_tma_store",
}  # fmt: skip
FIELDS = {
    KernelConfigForward: {"use_tma_load_w", "use_tma_load_x"},
    KernelConfigBackward_dX: {"use_tma_load_dy", "use_tma_load_w"},
    KernelConfigBackward_dW: {"use_tma_load_dy", "use_tma_load_x"},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_names_order_and_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    spelled = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional]
    assert ", ".join(spelled) == SIGNATURES[function]
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= OUR_OWN


@pytest.mark.parametrize("config", FIELDS, ids=lambda c: c.__name__)
def test_config_fields(config):
    assert set(inspect.signature(config).parameters) == SHARED_FIELDS | FIELDS[config]


def test_configs_label_themselves():
    config = KernelConfigBackward_dW(BLOCK_SIZE_M=64, permute_y=True, use_tma_load_x=True, use_tma_store=True)
    assert config.to_string() == "permute_y"
    assert set(config.to_string(include_tma=True).split(",")) == {"permute_y", "use_tma_load_x", "use_tma_store"}
    assert "BLOCK_SIZE_M=64" in config.to_string(include_tuning_params=True).split(",")


@pytest.mark.parametrize("config", FIELDS, ids=lambda c: c.__name__)
def test_one_config_serves_both_products_of_a_layer(device, config):
    """Unsloth's layers hand the same objects to both; what is permuted and multiplied is for each call to say."""
    argument = {
        KernelConfigForward: "kernel_config_fwd",
        KernelConfigBackward_dX: "kernel_config_bwd_dX",
        KernelConfigBackward_dW: "kernel_config_bwd_dW",
    }[config]
    shared = {argument: config(permute_x=True, permute_y=True, fuse_mul_post=True)}
    for flags in ({"permute_x": True}, {"permute_y": True, "is_first_gemm": False}, {}):
        case = make_case(device, flags=next(iter(flags), "plain"))
        call = dict(m_sizes=case.m_sizes, topk=2, gather_indices=case.gather_indices, **flags)
        results = []
        for configs in ({}, shared):
            X, W = case.X.detach().requires_grad_(), case.W.detach().requires_grad_()
            Y = grouped_gemm(X, W, **call, **configs)
            results.append([Y, *torch.autograd.grad(Y.sum(), [X, W])])
        assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore:moegemm. asked for:UserWarning")
def test_basic_grouped_gemm_example(device):
    shrink = 1 if device == "cuda" else 32
    W = torch.randn(8, 14336 // shrink, 4096 // shrink, dtype=torch.bfloat16, device=device)
    X = torch.randn(1024 // shrink, 4096 // shrink, dtype=torch.bfloat16, device=device)
    m_sizes = torch.tensor([128 // shrink] * 8, device=device)  # 128 tokens per expert

    config_fwd = KernelConfigForward(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64)
    Y = grouped_gemm(X, W, m_sizes, topk=2, kernel_config_fwd=config_fwd)

    assert Y.shape == (1024 // shrink, 14336 // shrink)
    expected = torch.bmm(X.view(8, 128 // shrink, -1).float(), W.float().transpose(1, 2)).view(Y.shape)
    assert (Y.float() - expected).norm() <= 2**-8 * expected.norm()


def test_backward_kernels_example(device):
    case = make_case(device, dtype=torch.bfloat16)
    X, W, m_sizes, gather_indices = case.X, case.W, case.m_sizes, None
    dY = torch.randn(case.rows, 24, device=device).bfloat16()

    # Input gradient computation
    dX = grouped_gemm_dX(dY, W, gather_indices, m_sizes, topk=2, autotune=True)
    # Weight gradient computation
    dW = grouped_gemm_dW(X, dY, m_sizes, gather_indices, topk=2, autotune=True)

    X, W = X.requires_grad_(), W.requires_grad_()
    expected = torch.autograd.grad(grouped_gemm(X, W, m_sizes, topk=2), [X, W], dY)
    assert torch.equal(dX, expected[0])
    assert torch.equal(dW, expected[1])
