"""Every invalid call raises the right type with the argument, the value and the rule, before any work."""

import moegemm
import numpy
import pytest
import torch
from conftest import make_case
from moegemm import KernelConfigBackward_dW, KernelConfigBackward_dX, KernelConfigForward


def arguments(flags: str = "plain", **changes) -> dict:
    return {**make_case(flags=flags).arguments(), **changes}


FLAG_RULES = [
    (arguments("permute_x", permute_y=True), "permute_x=True and permute_y=True"),
    (arguments("permute_x", is_first_gemm=False), "permute_x=True with is_first_gemm=False"),
    (arguments("permute_y", is_first_gemm=True), "permute_y=True with is_first_gemm=True"),
    (arguments("plain", fuse_mul_post=True, topk_weights=torch.ones(26)), "fuse_mul_post=True with permute_y=False"),
    (arguments("permute_y_mul", is_first_gemm=True), "is_first_gemm=True"),
    (arguments("permute_x", gather_indices=None), "gather_indices is None; permute_x=True needs it"),
    (arguments("permute_y", gather_indices=None), "gather_indices is None; permute_y=True needs it"),
    (arguments("permute_y_mul", topk_weights=None), "topk_weights is None; fuse_mul_post=True needs it"),
    (arguments(dX_only=True, dW_only=True), "dX_only=True and dW_only=True"),
]
VALUE_RULES = [
    (arguments(topk=0), "topk is 0; it must be at least 1"),
    (arguments(X=torch.ones(26, 39)), r"X is fp32\[26, 39\].*K = 40"),
    (arguments(X=torch.ones(40)), r"X is fp32\[40\].*must be \[T, K\] or \[M, K\]"),
    (arguments(X=torch.ones(26, 40, 1, 1)), "X has 4 dimensions"),
    (arguments(W=torch.ones(4, 24, 40)), r"W is fp32\[4, 24, 40\].*E = 5"),
    (arguments(W=torch.ones(121, 40)), r"W is fp32\[121, 40\].*multiple of E = 5"),
    (arguments(W=torch.ones(40)), r"W is fp32\[40\].*\[E, N, K\]"),
    (arguments(W=torch.ones(5, 24, 0), X=torch.ones(26, 0)), "K must be at least 1"),
    (arguments(W=torch.ones(5, 0, 40)), "N must be at least 1"),
    (arguments(m_sizes=torch.ones(5, 1, dtype=torch.int32)), r"m_sizes is int32\[5, 1\].*\[E\]"),
    (arguments(m_sizes=torch.ones(0, dtype=torch.int32)), "E must be at least 1"),
    (arguments("permute_y", X=torch.ones(25, 40)), r"gather_indices is int32\[26\].*M = 25"),
    (arguments("permute_y_mul", topk_weights=torch.ones(25)), r"topk_weights is fp32\[25\].*M = 26"),
    (arguments("permute_y_mul", topk_weights=torch.ones(2, 13)), r"topk_weights is fp32\[2, 13\].*\[T, topk\]"),
]
TYPE_RULES = [
    (arguments(X=torch.ones(26, 40, dtype=torch.float64)), "X has dtype Double"),
    (arguments(X=torch.ones(26, 40, dtype=torch.int32)), "X has dtype int32"),
    (arguments(W=torch.ones(5, 24, 40, dtype=torch.bfloat16)), "W has dtype bf16; it must have fp32"),
    (arguments(m_sizes=torch.ones(5)), "m_sizes has dtype fp32; accepted are int32 and int64"),
    (arguments("permute_x", gather_indices=torch.ones(26)), "gather_indices has dtype fp32"),
    (arguments("permute_y_mul", topk_weights=torch.ones(26, dtype=torch.float16)), "topk_weights has dtype fp16"),
    (arguments(X=[[1.0]]), "X is .* of type list; a torch.Tensor is accepted"),
    (arguments(m_sizes=[3, 2]), "m_sizes is .* of type list"),
    (arguments(X=None), "X is None"),
    (arguments(X=numpy.zeros((500, 500))), r"^X is an array of shape \[500, 500\] of type ndarray; a torch.Tensor"),
    (arguments(W=[[0.5] * 3000] * 3000), "^W is .{,80} of type list; a torch.Tensor is accepted$"),
    (arguments(m_sizes={"expert": list(range(9999))}), "^m_sizes is .{,80} of type dict"),
    (arguments(kernel_config_fwd=numpy.zeros(9999)), r"kernel_config_fwd is an array of shape \[9999\]; a KernelCon"),
    (arguments(topk=numpy.zeros(9999)), r"^topk is an array of shape \[9999\] of type ndarray; an int is accepted$"),
    (arguments(topk=2.0), "topk is 2.0 of type float; an int is accepted"),
    (arguments(kernel_config_fwd=KernelConfigBackward_dX()), "kernel_config_fwd is .*; a KernelConfigForward is"),
    (arguments(kernel_config_bwd_dW=(64, 64, 64)), "kernel_config_bwd_dW is .*; a KernelConfigBackward_dW is"),
]
TMA_RULES = [
    ("permute_x", "kernel_config_fwd", KernelConfigForward(use_tma_load_x=True), "use_tma_load_x"),
    ("permute_y", "kernel_config_fwd", KernelConfigForward(use_tma_store=True), "use_tma_store"),
    ("permute_y", "kernel_config_bwd_dX", KernelConfigBackward_dX(use_tma_load_dy=True), "use_tma_load_dy"),
    ("permute_x", "kernel_config_bwd_dX", KernelConfigBackward_dX(use_tma_store=True), "use_tma_store"),
    ("permute_x", "kernel_config_bwd_dW", KernelConfigBackward_dW(use_tma_load_x=True), "use_tma_load_x"),
    ("permute_y", "kernel_config_bwd_dW", KernelConfigBackward_dW(use_tma_load_dy=True), "use_tma_load_dy"),
]


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(("call", "message"), FLAG_RULES + VALUE_RULES, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_values(call, message, needs_grad):
    call = {**call, "X": call["X"].detach().requires_grad_(needs_grad)}
    with pytest.raises(ValueError, match=message):
        moegemm.grouped_gemm(**call)


@pytest.mark.parametrize(("call", "message"), TYPE_RULES, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_types(call, message):
    with pytest.raises(TypeError, match=message):
        moegemm.grouped_gemm(**call)


@pytest.mark.parametrize(("flags", "argument", "config", "field"), TMA_RULES)
def test_tma_cannot_gather_or_scatter(flags, argument, config, field):
    with pytest.raises(ValueError, match=rf"{argument}\.{field}=True with {flags}=True"):
        moegemm.grouped_gemm(**arguments(flags, **{argument: config}))


def test_tma_rules_hold_for_the_raw_functions():
    case = make_case(flags="permute_x")
    with pytest.raises(ValueError, match="use_tma_load_x=True with permute_x=True"):
        moegemm.grouped_gemm_forward(
            case.X, case.W, 2, case.m_sizes, case.gather_indices, permute_x=True, use_tma_load_x=True
        )


def test_tma_rules_hold_while_a_call_is_compiled():
    """Of a product that the forward does not run."""
    gathers = arguments("permute_x", kernel_config_bwd_dW=KernelConfigBackward_dW(use_tma_load_x=True))
    with pytest.raises(RuntimeError, match=r"kernel_config_bwd_dW\.use_tma_load_x=True with permute_x=True"):
        torch.compile(moegemm.grouped_gemm, backend="eager")(**gathers)
    in_order = arguments("permute_x", kernel_config_bwd_dW=KernelConfigBackward_dW(use_tma_load_dy=True))
    compiled = torch.compile(moegemm.grouped_gemm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**in_order), moegemm.grouped_gemm(**in_order))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"BLOCK_SIZE_M": 0}, ValueError, "BLOCK_SIZE_M is 0; it must be between"),
        ({"num_stages": -1}, ValueError, "num_stages is -1"),
        ({"BLOCK_SIZE_K": 64.0}, TypeError, "BLOCK_SIZE_K is 64.0; an int is accepted"),
        ({"use_tma_store": 1}, TypeError, "use_tma_store is 1; True or False is accepted"),
    ],
)
@pytest.mark.parametrize("config", [KernelConfigForward, KernelConfigBackward_dX, KernelConfigBackward_dW])
def test_configs_check_their_fields(config, fields, kind, message):
    with pytest.raises(kind, match=message):
        config(**fields)


def test_raw_functions_refuse_what_they_cannot_do():
    case = make_case()
    X, W, m_sizes, dY = case.X, case.W, case.m_sizes, torch.ones(26, 24)
    with pytest.raises(NotImplementedError, match="fuse_mul_pre=True; only False"):
        moegemm.grouped_gemm_dX(dY, W, None, m_sizes, 2, fuse_mul_pre=True)
    with pytest.raises(ValueError, match="accumulate=True with out=None"):
        moegemm.grouped_gemm_dW(X, dY, m_sizes, None, 2, accumulate=True)
    with pytest.raises(TypeError, match="out has dtype bf16; accepted are fp32"):
        moegemm.grouped_gemm_dW(X, dY, m_sizes, None, 2, out=torch.empty(5, 24, 40, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="out_dtype is"):
        moegemm.grouped_gemm_forward(X, W, 2, m_sizes, out_dtype=torch.float16)
    with pytest.raises(TypeError, match=r"out is \[1.0\] of type list; a torch.Tensor is accepted"):
        moegemm.grouped_gemm_forward(X, W, 2, m_sizes, out=[1.0])
    with pytest.raises(ValueError, match=r"out is fp32\[26, 23\].*must be \[M, N\] = \[26, 24\]"):
        moegemm.grouped_gemm_forward(X, W, 2, m_sizes, out=torch.empty(26, 23))
    with pytest.raises(ValueError, match=r"out is .* strides that overlap"):
        moegemm.grouped_gemm_forward(X, W, 2, m_sizes, out=torch.empty(24).expand(26, 24))
    with pytest.raises(ValueError, match=r"dY is fp32\[26, 23\].*N = 24"):
        moegemm.grouped_gemm_dX(torch.ones(26, 23), W, None, m_sizes, 2)


def test_out_must_not_be_an_input():
    case = make_case(n=40)
    with pytest.raises(ValueError, match="overlap"):
        moegemm.grouped_gemm_forward(case.X, case.W, 2, case.m_sizes, out=case.X)
    wide = torch.zeros(26, 90)
    dense = wide.view(-1)[20 : 20 + 26 * 40].view(26, 40)
    for X, out in ((wide[:, :40], dense), (dense, wide[:, :40])):
        with pytest.raises(ValueError, match="out overlaps X in memory"):
            moegemm.grouped_gemm_forward(X, case.W, 2, case.m_sizes, out=out)


@pytest.mark.parametrize(
    ("m_sizes", "indices", "message"),
    [
        ([3, -1, 2, 2, 2], None, r"m_sizes\[1\] is -1"),
        ([9, 9, 9, 0, 0], None, r"add up to 27; there are only M = 26"),
        (None, 26, r"gather_indices\[4\] is 26; indices must be in \[0, M\)"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_check_finds_bad_routing(device, monkeypatch, by, m_sizes, indices, message):
    case = make_case(device, "permute_y")
    if m_sizes is not None:
        case.m_sizes = torch.tensor(m_sizes, dtype=torch.int32, device=device)
    if indices is not None:
        case.gather_indices[4] = indices
    assert torch.isfinite(moegemm.grouped_gemm(**case.arguments())).all()
    if by == "environment":
        monkeypatch.setenv("MOEGEMM_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        moegemm.grouped_gemm(**case.arguments(), check=by == "argument")


def test_routing_functions_refuse_bad_arguments():
    with pytest.raises(TypeError, match="expert_ids has dtype fp32"):
        moegemm.route(torch.ones(3, 2), 4)
    with pytest.raises(ValueError, match=r"expert_ids is int64\[3\].*\[T, topk\]"):
        moegemm.route(torch.ones(3, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="num_experts is 0"):
        moegemm.route(torch.ones(3, 2, dtype=torch.int64), 0)
    with pytest.raises(TypeError, match="dtype is"):
        moegemm.route(torch.ones(3, 2, dtype=torch.int64), 4, dtype=torch.int16)
    with pytest.raises(ValueError, match="multiple of topk = 2"):
        moegemm.combine(torch.ones(5, 3), topk=2)
    with pytest.raises(ValueError, match="topk is None"):
        moegemm.combine(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"weights is fp32\[3\].*M = 4"):
        moegemm.combine(torch.ones(4, 3), torch.ones(3), 2)


def test_meta_tensors_work_and_other_devices_are_named():
    case = make_case()
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in case.arguments().items()}
    assert moegemm.grouped_gemm(**meta).shape == (26, 24)


def test_mixed_devices_are_refused(device):
    if device == "cpu":
        pytest.skip("needs a second device")
    case = make_case(device)
    with pytest.raises(TypeError, match="m_sizes is on cpu; it must be on cuda:0"):
        moegemm.grouped_gemm(**{**case.arguments(), "m_sizes": case.m_sizes.cpu()})


@pytest.fixture
def distribute():
    """Makes a DTensor of a tensor, in a group of this process alone."""
    tensor = pytest.importorskip("torch.distributed.tensor")
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    yield lambda t: tensor.distribute_tensor(t, mesh)
    distributed.destroy_process_group()


@pytest.mark.parametrize("everything", [False, True])
def test_distributed_tensors_are_told_what_to_do(distribute, everything):
    ids, x, w1, w2 = torch.randint(3, (5, 2)), torch.randn(5, 8), torch.randn(3, 12, 8), torch.randn(3, 8, 6)
    m_sizes, rows = torch.tensor([5, 3, 2]), torch.randn(10, 8)
    products = [  # their weights may be DTensors
        lambda d, o: moegemm.grouped_gemm(o(rows), d(w1), o(m_sizes), 1),
        lambda d, o: moegemm.grouped_gemm(o(rows), d(w1).requires_grad_(), o(m_sizes), 2),
        lambda d, o: moegemm.grouped_gemm_forward(o(rows), d(w1), 1, o(m_sizes)),
        lambda d, o: moegemm.moe_mlp(o(x), d(w1), d(w2), o(ids), None),
        lambda d, o: moegemm.moe_mlp(o(x), d(w1).requires_grad_(), d(w2), o(ids), None),
        lambda d, o: moegemm.lora_moe_mlp(o(x), d(w1), d(w2), o(ids), None),
    ]
    others = [lambda d, o: moegemm.route(d(ids), 3), lambda d, o: moegemm.combine(d(rows), topk=2)]
    for call in [*others, *products] if everything else others:
        with pytest.raises(TypeError, match=r"(\w+) is a DTensor; .*: give \1\.to_local\(\)"):
            call(distribute, distribute)
    for call in products:
        assert torch.equal(call(distribute, lambda t: t), call(lambda t: t, lambda t: t))


def test_a_distributed_weight_is_no_way_around_the_rules(distribute):
    rows, w, sizes = torch.randn(10, 8), distribute(torch.randn(3, 12, 8)), torch.tensor([5, 3, 2])
    with pytest.raises(ValueError, match="dX_only=True and dW_only=True"):
        moegemm.grouped_gemm(rows, w, sizes, 1, dX_only=True, dW_only=True)
    with pytest.raises(ValueError, match="permute_x=True with is_first_gemm=False"):
        moegemm.grouped_gemm(rows, w, sizes, 1, permute_x=True, is_first_gemm=False)


@pytest.mark.parametrize("value", [2**32 + 64, 3.7, -5, 0])
def test_a_config_that_was_changed_since_is_checked_again(value):
    config = KernelConfigForward()
    config.BLOCK_SIZE_M = value
    with pytest.raises((TypeError, ValueError), match=r"KernelConfigForward\.BLOCK_SIZE_M is"):
        moegemm.grouped_gemm(**arguments(kernel_config_fwd=config))


def test_main_grad_of_a_distributed_weight_is_refused_before_anything_runs(distribute):
    rows, w, sizes = torch.randn(10, 8), distribute(torch.randn(3, 12, 8)).requires_grad_(), torch.tensor([5, 3, 2])
    w.main_grad = torch.zeros(3, 12, 8)
    with pytest.raises(TypeError, match="W is a DTensor; accumulate=True takes parameters that are plain tensors"):
        moegemm.grouped_gemm(rows, w, sizes, 1, accumulate=True)


def test_too_little_memory_is_what_torch_calls_it():
    """Those who then try again with less look for torch's type and words."""
    one, rows = torch.ones(1, dtype=torch.int64), torch.ones(1, 8).expand(2**44, 8)
    with pytest.raises(torch.OutOfMemoryError, match=r"memory(.|\n)*for a tensor \[17592186044416, 8\] on cpu"):
        moegemm.grouped_gemm(rows, torch.ones(1, 8, 8), one, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"for a tensor \[17592186044416, 8\]"):  # the copy of an operand
        moegemm.grouped_gemm_dW(rows, rows, one, None, 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"for a tensor \[1125899906842624\]"):
        moegemm.route(torch.zeros(3, 2, dtype=torch.int64), 2**50, dtype=torch.int64)


def test_a_number_of_experts_is_no_bool():
    with pytest.raises(TypeError, match="num_experts is True of type bool; an int is accepted"):
        moegemm.route(torch.zeros(3, 2, dtype=torch.int64), True)
