"""Forward-mode derivatives where they exist, and refusals where torch alone would return zeros or None."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from reference import Case, assert_close, reference_forward
from second_derivatives import WAYS, second_derivative
from torch.autograd import forward_ad


def values(case: Case) -> dict[str, torch.Tensor]:
    """The differentiable arguments by name."""
    named = {"X": case.X, "W": case.W, "topk_weights": case.topk_weights}
    return {name: t for name, t in named.items() if t is not None}


def product_of(case: Case, names: list[str]):
    return lambda *tensors: moegemm.grouped_gemm(**{**case.arguments(), **dict(zip(names, tensors, strict=True))})


def exact_tangent(case: Case, tangents: dict[str, torch.Tensor], of=lambda t: t.double()) -> torch.Tensor:
    """The sum of the products with one argument replaced by its tangent, in float64."""
    total = 0
    for name, tangent in tangents.items():
        changed = case.map_values(of)
        setattr(changed, name, of(tangent))
        total = total + reference_forward(changed)
    return total


NEEDS = [(flags, names) for flags in FLAGS for names in (["X"], ["W"], ["X", "W"])]
NEEDS += [("permute_y_mul", ["topk_weights"]), ("permute_y_mul", ["X", "W", "topk_weights"])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("flags", "names"), NEEDS)
@pytest.mark.parametrize("way", ["func.jvp", "dual_level"])
def test_forward_mode_gives_the_tangent_of_the_product(device, flags, names, dtype, way):
    case = make_case(device, flags, dtype, unrouted=0 if flags == "permute_x" else 3)
    given = values(case)
    tangents = {name: torch.randn_like(given[name]) for name in names}
    call = product_of(case, names)
    if way == "func.jvp":
        Y, dY = torch.func.jvp(call, tuple(given[n] for n in names), tuple(tangents.values()))
    else:
        with forward_ad.dual_level():
            Y, dY = forward_ad.unpack_dual(call(*(forward_ad.make_dual(given[n], tangents[n]) for n in names)))
    assert torch.equal(Y, moegemm.grouped_gemm(**case.arguments()))
    size = exact_tangent(case, tangents, lambda t: t.double().abs())
    assert_close("tangent", dY, exact_tangent(case, tangents), size, 40 * len(names) + len(names))


def test_a_plain_call_has_tangents_too(device):
    X, W = torch.randn(6, 16, device=device), torch.randn(3, 8, 16, device=device)
    m_sizes, d_x = torch.tensor([2, 0, 4], device=device), torch.randn(6, 16, device=device)
    _, got = torch.func.jvp(lambda x: moegemm.grouped_gemm(x, W, m_sizes, 1), (X,), (d_x,))
    assert torch.equal(got, moegemm.grouped_gemm(d_x, W, m_sizes, 1))


@pytest.mark.parametrize("flags", FLAGS)
def test_jacfwd_is_the_jacobian(device, flags):
    case = make_case(device, flags, tokens=3, experts=3, n=2, k=3)
    given = values(case)
    names = list(given)
    argnums = tuple(range(len(names)))
    got = torch.func.jacfwd(product_of(case, names), argnums)(*given.values())

    def exact(*tensors):
        changed = case.map_values(lambda t: t.double())
        for name, tensor in zip(names, tensors, strict=True):
            setattr(changed, name, tensor)
        return reference_forward(changed)

    expected = torch.autograd.functional.jacobian(exact, tuple(t.double() for t in given.values()))
    for name, a, b in zip(names, got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_forward_mode_agrees_with_backward_and_with_differences(device):
    """<dY, J v> = <J^T dY, v>, and the difference of two products, exact because the product is linear in X."""
    case = make_case(device, "permute_x")
    v = torch.randn_like(case.X)
    Y, tangent = torch.func.jvp(product_of(case, ["X"]), (case.X,), (v,))
    dY = torch.randn_like(Y)
    _, pull_back = torch.func.vjp(product_of(case, ["X"]), case.X)
    torch.testing.assert_close((dY * tangent).sum(), (pull_back(dY)[0] * v).sum(), rtol=1e-4, atol=1e-3)
    difference = product_of(case, ["X"])(case.X + v) - Y
    torch.testing.assert_close(tangent, difference, rtol=1e-4, atol=1e-4)


def test_a_tangent_can_be_differentiated(device):
    """d/dW of the tangent in X: forward, then backward, and forward twice."""
    case = make_case(device, "permute_y_mul")
    v, u = torch.randn_like(case.X), torch.randn_like(case.W)

    def tangent(W):
        return torch.func.jvp(product_of(_with(case, W=W), ["X"]), (case.X,), (v,))[1]

    gradient = torch.func.grad(lambda W: tangent(W).square().sum())(case.W)
    W = case.W.detach().requires_grad_()
    moegemm.grouped_gemm(**_with(case, X=v, W=W).arguments()).square().sum().backward()
    torch.testing.assert_close(gradient, W.grad)
    _, second = torch.func.jvp(tangent, (case.W,), (u,))
    torch.testing.assert_close(second, moegemm.grouped_gemm(**_with(case, X=v, W=u).arguments()))


def _with(case: Case, **changes) -> Case:
    return Case(**{**case.__dict__, **changes})


def test_tensors_without_a_tangent_pass_inside_a_dual_level(device):
    case = make_case(device, "permute_x")
    expected = moegemm.grouped_gemm(**case.arguments())
    X, W = case.X.clone().requires_grad_(), case.W
    with forward_ad.dual_level():
        Y = moegemm.grouped_gemm(**{**case.arguments(), "X": X})
        assert torch.equal(Y, expected)
        assert forward_ad.unpack_dual(Y).tangent is None
        Y.sum().backward()
        raw = moegemm.grouped_gemm_forward(case.X, W, 2, case.m_sizes, case.gather_indices, permute_x=True)
    assert X.grad is not None
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_combine_has_a_forward_mode_derivative(device, flat, out_dtype):
    rows, weights = torch.randn(12, 5, device=device).bfloat16(), torch.rand(4, 3, device=device)
    if flat:
        weights = weights.view(-1)
    d_rows, d_weights = torch.randn_like(rows), torch.randn_like(weights)

    def call(r, w):
        return moegemm.combine(r, w, 3, out_dtype=out_dtype)

    def exact(r, w):
        return (r.double().view(4, 3, 5) * w.double().view(4, 3, 1)).sum(1)

    for changed in ((d_rows, d_weights), (d_rows, torch.zeros_like(weights))):
        out, tangent = torch.func.jvp(call, (rows, weights), changed)
        assert torch.equal(out, call(rows, weights))
        assert tangent.dtype == out.dtype
        expected = torch.func.jvp(exact, (rows, weights), changed)[1]
        torch.testing.assert_close(tangent.double(), expected, rtol=2**-8, atol=2**-8)
    alone = torch.func.jvp(lambda r: moegemm.combine(r, topk=3), (rows,), (d_rows,))[1]
    assert torch.equal(alone, moegemm.combine(d_rows, topk=3))
    jacobians = torch.func.jacfwd(call, (0, 1))(rows, weights)
    for got, expected in zip(jacobians, torch.func.jacfwd(exact, (0, 1))(rows, weights), strict=True):
        torch.testing.assert_close(got.double(), expected.double(), rtol=2**-8, atol=2**-8)


def test_second_derivatives_of_combine_are_right(device):
    rows = torch.randn(6, 4, device=device, requires_grad=True)
    weights = torch.rand(3, 2, device=device, requires_grad=True)

    def exact(r, w):
        return (r.view(3, 2, 4) * w.unsqueeze(-1)).sum(1)

    found = []
    for function in (moegemm.combine, exact):
        (d_rows,) = torch.autograd.grad(function(rows, weights).square().sum(), rows, create_graph=True)
        found.append(torch.autograd.grad(d_rows.square().sum(), (rows, weights)))
        hessian = torch.func.hessian(lambda r, f=function: f(r, weights).square().sum())(rows)
        found[-1] = (*found[-1], hessian)
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["grouped_gemm_forward", "grouped_gemm_dX", "grouped_gemm_dW"])
@pytest.mark.parametrize("into_out", [False, True])
def test_raw_functions_refuse_tangents(device, name, into_out):
    case = make_case(device)
    dY = torch.randn(case.rows, 24, device=device)
    calls = {
        "grouped_gemm_forward": lambda x, **o: moegemm.grouped_gemm_forward(x, case.W, 2, case.m_sizes, **o),
        "grouped_gemm_dX": lambda x, **o: moegemm.grouped_gemm_dX(x, case.W, None, case.m_sizes, 2, **o),
        "grouped_gemm_dW": lambda x, **o: moegemm.grouped_gemm_dW(x, dY, case.m_sizes, None, 2, **o),
    }
    first = dY if name == "grouped_gemm_dX" else case.X
    options = {"out": calls[name](first)} if into_out else {}
    before = calls[name](first)
    with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
        torch.func.jvp(lambda x: calls[name](x, **options), (first,), (torch.ones_like(first),))
    assert not into_out or torch.equal(options["out"], before)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_of_the_product_are_refused(device, flags, way):
    case = make_case(device, flags, tokens=2, n=3, k=2)
    call = product_of(case, ["X"])

    def loss(x):
        return call(x).square().sum()

    with pytest.raises(RuntimeError, match="grouped_gemm can be differentiated once only"):
        second_derivative(way, loss, case.X)


@pytest.mark.parametrize("name", ["grouped_gemm", "combine"])
def test_compiled_forward_mode_runs_eagerly_or_is_refused(device, name):
    X, W = torch.randn(6, 16, device=device), torch.randn(3, 8, 16, device=device)
    m_sizes = torch.tensor([2, 0, 4], device=device)

    def run(x):
        return moegemm.combine(x, topk=2) if name == "combine" else moegemm.grouped_gemm(x, W, m_sizes, 1)

    def tangent(x):
        return torch.func.jvp(run, (x,), (x,))[1]

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{name} has no forward-mode derivative inside"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(X)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(tangent, backend="aot_eager")(X), run(X))
