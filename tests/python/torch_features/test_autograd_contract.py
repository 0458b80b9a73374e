"""What autograd promises besides the right numbers: no needless work, nothing extra saved, clear refusals."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from counted import Counted
from moegemm.autograd import DEFAULTS
from moegemm.operators import shortcuts
from torch.utils.checkpoint import checkpoint


def leaves(case, need=("X", "W", "topk_weights")) -> dict:
    named = case.arguments()
    for name in need:
        if named[name] is not None:
            named[name] = named[name].detach().clone().requires_grad_()
    return named


def plain_leaves(device) -> dict:
    """Of a call that asks for nothing but the product."""
    named = leaves(make_case(device, "plain", topk=1))
    return {name: named[name] for name in ("X", "W", "m_sizes", "topk")}


def launches_of_backward(arguments: dict) -> list[str]:
    Y = moegemm.grouped_gemm(**arguments)
    with Counted() as launches:
        Y.sum().backward()
    return sorted(launches.names)


@pytest.mark.parametrize(
    ("flags", "need", "expected"),
    [
        ("plain", ["X", "W"], ["dw", "dx"]),
        ("plain", ["X"], ["dx"]),
        ("plain", ["W"], ["dw"]),
        ("permute_x", ["X", "W"], ["combine", "dw", "dx"]),
        ("permute_x", ["W"], ["dw"]),
        ("permute_y", ["X"], ["dx"]),
        ("permute_y_mul", ["X", "W", "topk_weights"], ["dw", "dx", "scale_rows"]),
        ("permute_y_mul", ["X", "W"], ["dw", "dx"]),
        ("permute_y_mul", ["topk_weights"], ["dx", "scale_rows"]),
        ("permute_y_mul", ["W"], ["dw"]),
    ],
)
def test_backward_runs_only_what_is_needed(device, flags, need, expected):
    assert launches_of_backward(leaves(make_case(device, flags), need)) == expected


@pytest.mark.parametrize(
    ("flags", "only", "expected"),
    [
        ("plain", "dX_only", ["dx"]),
        ("plain", "dW_only", ["dw"]),
        ("permute_y_mul", "dX_only", ["dx", "scale_rows"]),
        ("permute_y_mul", "dW_only", ["dw"]),
    ],
)
def test_dX_only_and_dW_only_skip_work(device, flags, only, expected):
    arguments = {**leaves(make_case(device, flags)), only: True}
    assert launches_of_backward(arguments) == expected
    assert (arguments["X"].grad is None) == (only == "dW_only")
    assert (arguments["W"].grad is None) == (only == "dX_only")


def saved_by(call) -> list[torch.Tensor]:
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        call()
    return saved


@pytest.mark.parametrize("flags", FLAGS)
def test_only_the_named_tensors_are_saved_and_never_copied(device, flags):
    arguments = leaves(make_case(device, flags))
    saved = saved_by(lambda: moegemm.grouped_gemm(**arguments))
    named = {t.data_ptr() for t in arguments.values() if isinstance(t, torch.Tensor)}
    assert {t.data_ptr() for t in saved} <= named
    assert len(saved) <= 5


def apply_function(X, W, m_sizes, topk, **others):
    """The Function that transforms and torch.compile see; eager calls take a shorter way."""
    return moegemm.GroupedGemm.apply(X, W, m_sizes, None, None, (topk, "", moegemm.autograd.DEFAULTS))


@pytest.mark.parametrize("way", [moegemm.grouped_gemm, apply_function])
@pytest.mark.parametrize("wanted", ["X", "W"])
def test_an_operand_is_not_kept_where_only_its_own_gradient_is_wanted(device, way, wanted):
    arguments = leaves(make_case(device), [wanted])
    saved = saved_by(lambda: way(**arguments))
    assert saved
    assert arguments[wanted].data_ptr() not in {t.data_ptr() for t in saved}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_grad(device, mode):
    arguments = leaves(make_case(device))

    def call():
        with mode():
            assert moegemm.grouped_gemm(**arguments).grad_fn is None

    assert saved_by(call) == []


def test_inference_mode_tensors_are_accepted(device):
    with torch.inference_mode():
        case = make_case(device, "permute_x")
        expected = moegemm.grouped_gemm(**case.arguments())
    assert torch.equal(moegemm.grouped_gemm(**case.arguments()), expected)


def test_changing_a_saved_tensor_is_noticed(device):
    arguments = leaves(make_case(device), ["W"])
    Y = moegemm.grouped_gemm(**arguments)
    arguments["X"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.sum().backward()


def test_errors_of_backward_keep_their_type(monkeypatch):
    """A backend that cannot run dX, met only in backward."""
    arguments = leaves(make_case())
    Y = moegemm.grouped_gemm(**arguments)
    monkeypatch.setenv("MOEGEMM_BACKEND", "sm80")
    with pytest.raises(NotImplementedError, match="sm80"):
        Y.sum().backward()


def test_double_backward_refuses_clearly(device):
    arguments = leaves(make_case(device))
    Y = moegemm.grouped_gemm(**arguments)
    (dX,) = torch.autograd.grad(Y.square().sum(), arguments["X"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        dX.square().sum().backward()


def test_create_graph_alone_changes_nothing(device):
    arguments = leaves(make_case(device, "permute_y_mul"))
    wanted = [arguments[name] for name in ("X", "W", "topk_weights")]
    plain = torch.autograd.grad(moegemm.grouped_gemm(**arguments).sum(), wanted)
    graphed = torch.autograd.grad(moegemm.grouped_gemm(**arguments).sum(), wanted, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, graphed, strict=True))


def test_grouped_gemm_class_is_the_same_function(device):
    case = make_case(device)
    X = case.X.requires_grad_()
    Y = moegemm.GroupedGemm.apply(X, case.W, case.m_sizes, None, None, (case.topk, "", DEFAULTS))
    assert torch.equal(Y, moegemm.grouped_gemm(**case.arguments()))
    Y.sum().backward()
    assert X.grad is not None


@pytest.mark.parametrize("flat_weights", [False, True])
@pytest.mark.parametrize("need", [("X", "W", "topk_weights"), ("X",), ("W",), ("topk_weights",)])
@pytest.mark.parametrize(("flags", "topk"), [("plain", 1), *((flags, 2) for flags in FLAGS)])
def test_eager_and_transformed_calls_give_the_same_bits(device, flags, topk, need, flat_weights):
    """They are two autograd Functions; torch.func only knows one of them."""
    arguments = make_case(device, flags, torch.bfloat16, topk=topk).arguments()
    if flat_weights:
        arguments["W"] = arguments["W"].flatten(0, 1)
    need = [name for name in need if arguments[name] is not None]
    if not need:
        pytest.skip("no topk_weights in this case")

    def product(*values):
        return moegemm.grouped_gemm(**{**arguments, **dict(zip(need, values, strict=True))})

    values = [arguments[name] for name in need]
    expected, pull_back = torch.func.vjp(product, *values)
    dY = torch.randn_like(expected)
    wanted = [value.clone().requires_grad_() for value in values]
    Y = product(*wanted)
    assert torch.equal(Y, expected)
    for mine, theirs in zip(torch.autograd.grad(Y, wanted, dY), pull_back(dY), strict=True):
        assert torch.equal(mine, theirs)


def test_accumulate_adds_to_main_grad(device):
    arguments = leaves(make_case(device, "permute_x", torch.bfloat16))
    W = arguments["W"]
    moegemm.grouped_gemm(**arguments).sum().backward()
    expected = W.grad.float()
    W.grad = None
    W.main_grad = torch.ones(W.shape, device=device)
    for _ in range(2):
        moegemm.grouped_gemm(**arguments, accumulate=True).sum().backward()
    assert W.grad is None
    torch.testing.assert_close(W.main_grad, 1 + 2 * expected, rtol=2**-8, atol=2**-7)


def test_accumulate_tells_frameworks_that_wait_for_a_hook(device):
    arguments = leaves(make_case(device))
    W = arguments["W"]
    W.main_grad = torch.zeros_like(W, requires_grad=False)
    W.grad_added_to_main_grad = False
    fired = []
    W.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.abs().max().item()))
    moegemm.grouped_gemm(**arguments, accumulate=True).sum().backward()
    assert W.grad_added_to_main_grad
    assert fired == [0.0]
    assert W.main_grad.any()


@pytest.mark.parametrize(
    ("main_grad", "kind"),
    [
        (None, ValueError),
        (torch.zeros(5, 24, 40, dtype=torch.float16), TypeError),
        (torch.zeros(5, 24, 39), ValueError),
    ],
)
def test_accumulate_needs_a_fitting_main_grad(main_grad, kind):
    arguments = leaves(make_case())
    if main_grad is not None:
        arguments["W"].main_grad = main_grad
    with pytest.raises(kind, match=r"W\.main_grad"):
        moegemm.grouped_gemm(**arguments, accumulate=True)


def test_autocast_casts_like_mm(device):
    arguments = leaves(make_case(device, "permute_y_mul"))
    with torch.autocast(device, dtype=torch.bfloat16):
        Y = moegemm.grouped_gemm(**arguments)
        assert Y.dtype == torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)).dtype
    Y.sum().backward()
    for name in ("X", "W", "topk_weights"):
        assert arguments[name].grad.dtype == torch.float32


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_of_a_plain_call(device, grad):
    arguments = plain_leaves(device)
    with torch.set_grad_enabled(grad):
        with torch.autocast(device, dtype=torch.bfloat16):
            Y = moegemm.grouped_gemm(**arguments)
            assert torch.equal(Y, moegemm.grouped_gemm(**arguments))
            with torch.autocast(device, enabled=False):
                assert moegemm.grouped_gemm(**arguments).dtype == torch.float32
        assert moegemm.grouped_gemm(**arguments).dtype == torch.float32
    assert Y.dtype == torch.bfloat16
    assert Y.requires_grad == grad
    if grad:
        Y.sum().backward()
        assert arguments["X"].grad.dtype == arguments["W"].grad.dtype == torch.float32


def test_transforms_of_a_plain_call(device):
    arguments = plain_leaves(device)
    moegemm.grouped_gemm(**arguments).square().sum().backward()
    X, W = arguments["X"].detach(), arguments["W"].detach()

    def loss(w):
        return moegemm.grouped_gemm(**{**arguments, "X": X, "W": w}).square().sum()

    assert torch.equal(torch.func.grad(loss)(W), arguments["W"].grad)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="cannot be vmapped"):
            torch.func.vmap(loss)(W.expand(3, -1, -1, -1))


def test_a_tf32_setting_that_stops_answering(device, monkeypatch):
    """torch's older setting raises once the newer one says something else."""
    asked = []

    def older_setting() -> bool:
        asked.append(1)
        raise RuntimeError("you have used mix of the legacy and new APIs")

    monkeypatch.setattr(shortcuts, "_read_older_setting", older_setting)
    arguments = plain_leaves(device)
    first, second = (moegemm.grouped_gemm(**arguments) for _ in range(2))
    assert torch.equal(first, second)
    assert len(asked) == (1 if device == "cuda" else 0)  # nobody asks on the CPU
    before = len(asked)
    assert shortcuts.cuda_matmul_uses_tf32() == shortcuts.cuda_matmul_uses_tf32()
    assert len(asked) == max(before, 1)


def test_activation_checkpointing(device):
    case = make_case(device, "permute_x")
    plain, recomputed = leaves(case), leaves(case)
    moegemm.grouped_gemm(**plain).square().sum().backward()

    def layer(X, W):
        return moegemm.grouped_gemm(**{**recomputed, "X": X, "W": W}).square().sum()

    checkpoint(layer, recomputed["X"], recomputed["W"], use_reentrant=False).backward()
    for name in ("X", "W"):
        assert torch.equal(plain[name].grad, recomputed[name].grad)


def test_vmap_refuses_clearly(device):
    case = make_case(device)
    with pytest.raises(NotImplementedError, match="cannot be vmapped"):
        torch.func.vmap(lambda x: moegemm.grouped_gemm(**{**case.arguments(), "X": x}))(case.X.expand(3, -1, -1))
    W = case.W.requires_grad_()
    with pytest.raises(NotImplementedError, match="cannot be vmapped"):
        torch.func.vmap(lambda x: moegemm.grouped_gemm(**{**case.arguments(), "X": x, "W": W}))(
            case.X.expand(3, -1, -1)
        )


def test_functional_gradients(device):
    arguments = leaves(make_case(device, "permute_x"))
    moegemm.grouped_gemm(**arguments).square().sum().backward()
    plain = {**arguments, "X": arguments["X"].detach(), "W": arguments["W"].detach()}
    gradient = torch.func.grad(lambda w: moegemm.grouped_gemm(**{**plain, "W": w}).square().sum())(plain["W"])
    assert torch.equal(gradient, arguments["W"].grad)


@pytest.mark.parametrize("flags", FLAGS)
def test_the_same_call_gives_the_same_bits(device, flags):
    case = make_case(device, flags, torch.bfloat16, tokens=50)
    results = []
    for _ in range(2):
        arguments = leaves(case)
        Y = moegemm.grouped_gemm(**arguments)
        Y.sum().backward()
        results.append([Y, arguments["X"].grad, arguments["W"].grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
