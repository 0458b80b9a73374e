"""experts_mlp of rows with gaps, cumulative ends, masks and tails: the bits of packed rows, and nothing in between."""

import moegemm
import pytest
import torch
import torch._dynamo.testing
from conftest import NO_CUDA
from expert_rows import SIZES, as_pairs, check_replays, leaves_of, make_rows, results
from layer_reference import relative_error

STARTS = (30, 3, 9, 12, 0)  # in another order than the experts, with gaps between them
ROWS = 40


def placed_rows(device: str = "cpu", dtype: torch.dtype = torch.float32, starts=STARTS, rows=ROWS, **more):
    """Packed tensors and their options, then the same rows in segments at `starts` of a buffer full of NaN."""
    tensors, options = make_rows(device, dtype, tail=0, **more)
    place = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, SIZES, strict=True)]).to(device)
    apart = dict(tensors)
    for name in ("rows", "row_weights"):
        if tensors[name] is not None:
            apart[name] = tensors[name].new_full((rows, *tensors[name].shape[1:]), float("nan"))
            apart[name][place] = tensors[name]
    there = {**options, "starts": torch.tensor(starts, device=device, dtype=options["sizes"].dtype)}
    return (tensors, options), (apart, there), place


def spread(value: torch.Tensor, place: torch.Tensor, rows: int = ROWS) -> torch.Tensor:
    wide = value.new_full((rows, *value.shape[1:]), float("nan"))
    wide[place] = value
    return wide


def assert_same(got: dict, expected: dict, place: torch.Tensor) -> None:
    for name, value in expected.items():
        if name in ("out", "rows", "row_weights"):
            assert torch.equal(got[name].flatten(0, got[name].dim() - value.dim())[place], value), name
        elif name in ("w_gate_up", "w_down"):  # rows are added in an order of the plan's choice
            assert relative_error(got[name], value.double()) <= torch.finfo(value.dtype).eps, name
        else:
            assert torch.equal(got[name], value), name


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tails", ["zero", "undefined"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_anywhere_have_the_bits_of_packed_rows(device, dtype, bias, tails, index_dtype):
    packed, apart, place = placed_rows(device, dtype, bias=bias, index_dtype=index_dtype)
    d_out = torch.randn_like(packed[0]["rows"])
    got = results(*apart, spread(d_out, place), tails=tails)
    assert_same(got, results(*packed, d_out), place)
    if tails == "zero":
        outside = torch.ones(ROWS, dtype=torch.bool, device=device)
        outside[place] = False
        assert not any(got[name][outside].any() for name in ("out", "rows", "row_weights"))
    with torch.no_grad():
        assert torch.equal(moegemm.experts_mlp(**apart[0], **apart[1], tails=tails)[place], got["out"][place])


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_cumulative_ends(device, index_dtype):
    tensors, options = make_rows(device, bias=True)
    d_out = torch.randn_like(tensors["rows"])
    expected = results(tensors, options, d_out)
    ends = options["sizes"].cumsum(0, dtype=index_dtype).view(1, -1)
    got = results(tensors, {**options, "sizes": ends}, d_out)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tails", ["zero", "undefined"])
def test_masked_rows(device, tails, weighted):
    capacity, experts = 11, len(SIZES)
    starts = tuple(e * capacity for e in range(experts))
    rows = experts * capacity
    packed, (tensors, options), place = placed_rows(device, starts=starts, rows=rows, bias=True, weighted=weighted)
    del options["starts"]
    for name in ("rows", "row_weights"):
        if tensors[name] is not None:
            tensors[name] = tensors[name].unflatten(0, (experts, capacity))
    d_out = torch.randn_like(packed[0]["rows"])
    shaped = spread(d_out, place, rows).unflatten(0, (experts, capacity))
    got = results(tensors, options, shaped, tails=tails, expected_rows=len(place))
    assert got["out"].shape == tensors["rows"].shape
    assert_same(got, results(*packed, d_out), place)
    out, grad_rows = torch.empty_like(tensors["rows"]), torch.empty_like(tensors["rows"])
    mine = leaves_of(tensors)
    made = moegemm.experts_mlp(**mine, **options, out=out, grad_rows_out=grad_rows)
    made.backward(shaped)
    assert torch.equal(out.flatten(0, 1)[place], got["out"].flatten(0, 1)[place])
    assert torch.equal(grad_rows.flatten(0, 1)[place], got["rows"].flatten(0, 1)[place])


def test_masked_sizes_beyond_the_capacity_are_clipped(device):
    tensors, options = make_rows(device, sizes=(4, 4), tail=0, weighted=False)
    tensors["rows"] = tensors["rows"].view(2, 4, -1)
    expected = moegemm.experts_mlp(**tensors, **options)
    options["sizes"] = torch.tensor([2**31, 4], device=device)
    assert torch.equal(moegemm.experts_mlp(**tensors, **options), expected)


@pytest.mark.parametrize("kind", ["plain", "weighted bias", "pair"])
@pytest.mark.parametrize("starts", [STARTS, None], ids=["gaps", "tail"])
def test_undefined_tails_are_left_alone(device, starts, kind):
    """In the caller's memory too, forward and backward."""
    places = starts or (0, 5, 5, 8, 17)
    packed, (tensors, options), place = placed_rows(
        device, torch.bfloat16, starts=places, bias=kind == "weighted bias", weighted=kind == "weighted bias"
    )
    if starts is None:
        del options["starts"]
    given = as_pairs(tensors, options) if kind == "pair" else tensors
    rows = given["rows"].requires_grad_()
    out, grad_rows = torch.full_like(rows, 5, requires_grad=False), torch.full_like(rows, 6, requires_grad=False)
    result = moegemm.experts_mlp(**given, **options, tails="undefined", out=out, grad_rows_out=grad_rows)
    d_out = torch.randn_like(packed[0]["rows"])
    result.backward(spread(d_out, place))
    outside = torch.ones(ROWS, dtype=torch.bool, device=device)
    outside[place] = False
    assert (out[outside] == 5).all()
    assert (grad_rows[outside] == 6).all()
    expected = results(*packed, d_out)
    assert torch.equal(out[place], expected["out"])
    assert relative_error(grad_rows[place], expected["rows"].double()) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("expected_rows", [0, 1, 18, 10**6])
def test_expected_rows_change_no_bits(device, expected_rows):
    (tensors, options), _, _ = placed_rows(device, torch.bfloat16, bias=True)
    d_out = torch.randn_like(tensors["rows"])
    got = results(tensors, options, d_out, expected_rows=expected_rows)
    assert_same(got, results(tensors, options, d_out), torch.arange(len(d_out), device=device))


def compiled_with(rows_of, **settings):
    """experts_mlp whose expected_rows are made in the graph, and how often it was compiled."""
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weights = torch.randn(3, 12, 8), torch.randn(3, 8, 6)

    def layer(rows, sizes, number=None):
        return moegemm.experts_mlp(rows, *weights, sizes, expected_rows=rows_of(rows, sizes, number))

    return layer, torch.compile(layer, backend=counted, fullgraph=True, **settings), counted


def test_another_number_of_expected_rows_is_not_another_graph():
    plain, compiled, counted = compiled_with(lambda rows, sizes, number: number)
    rows, sizes = torch.randn(40, 8), torch.tensor([2, 0, 3])
    for number in range(10, 30):
        assert torch.equal(compiled(rows, sizes, number), plain(rows, sizes, number))
    assert counted.frame_count <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_expected_rows_follow_the_number_of_rows_in_one_graph(dynamic):
    plain, compiled, counted = compiled_with(lambda rows, sizes, number: rows.size(0) // 2, dynamic=dynamic)
    for count in range(10, 30):
        rows, sizes = torch.randn(count, 8), torch.tensor([2, 0, 3])
        assert torch.equal(compiled(rows, sizes), plain(rows, sizes))
    assert counted.frame_count <= 2


def test_expected_rows_may_be_a_number_that_only_the_device_knows():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        plain, compiled, counted = compiled_with(lambda rows, sizes, number: sizes.sum().item())
        for sizes in ([2, 0, 3], [4, 4, 1], [0, 0, 0]):
            rows = torch.randn(9, 8)
            assert torch.equal(compiled(rows, torch.tensor(sizes)), plain(rows, torch.tensor(sizes)))
    assert counted.frame_count == 1


@pytest.mark.parametrize("case", ["starts", "ends", "masked"])
def test_layouts_compile_as_one_graph(device, case):
    _, (tensors, options), _ = placed_rows(device, bias=True)
    tensors = {name: t.nan_to_num() for name, t in tensors.items()}
    if case == "ends":
        options["sizes"] = options["sizes"].cumsum(0).view(1, -1)
        del options["starts"]
    elif case == "masked":
        tensors["rows"], tensors["row_weights"] = tensors["rows"].view(5, 8, -1), tensors["row_weights"].view(5, 8)
        del options["starts"]
    d_out = torch.randn_like(tensors["rows"])
    expected = results(tensors, options, d_out)
    mine = leaves_of(tensors)
    torch._dynamo.reset()
    out = torch.compile(moegemm.experts_mlp, backend="aot_eager", fullgraph=True)(**mine, **options)
    out.backward(d_out)
    assert torch.equal(out, expected["out"])
    assert all(torch.equal(t.grad.nan_to_num(), expected[name].nan_to_num()) for name, t in mine.items())


def test_meta_tensors_in_every_layout():
    _, (tensors, options), _ = placed_rows(bias=True)
    meta = {name: t.to("meta") for name, t in tensors.items()}
    options = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    assert moegemm.experts_mlp(**meta, **options).shape == (ROWS, 24)
    del options["starts"]
    assert moegemm.experts_mlp(**meta, **{**options, "sizes": options["sizes"].view(1, -1)}).shape == (ROWS, 24)
    meta["rows"], meta["row_weights"] = meta["rows"].view(5, 8, 24), meta["row_weights"].view(5, 8)
    assert moegemm.experts_mlp(**meta, **options).shape == (5, 8, 24)


@NO_CUDA
def test_a_cuda_graph_replays_with_other_starts():
    _, (tensors, options), _ = placed_rows("cuda", torch.bfloat16, bias=True)
    other = [(SIZES, STARTS), ((0, 9, 0, 2, 2), (0, 20, 1, 5, 38)), ((40, 0, 0, 0, 0), (0, 0, 0, 0, 0))]
    check_replays(tensors, options, [{"sizes": sizes, "starts": starts} for sizes, starts in other])


@NO_CUDA
@pytest.mark.parametrize("tails", ["zero", "undefined"])
def test_no_layout_synchronises(tails):
    _, (tensors, options), _ = placed_rows("cuda", torch.bfloat16, bias=True)
    masked = {**tensors, "rows": tensors["rows"].view(5, 8, -1), "row_weights": tensors["row_weights"].view(5, 8)}
    packed = {name: value for name, value in options.items() if name != "starts"}
    d_out = torch.randn_like(tensors["rows"])
    for _ in range(2):
        results(tensors, options, d_out, tails=tails, expected_rows=18)
        results(masked, packed, d_out.view(5, 8, -1), tails=tails)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


INT = torch.int64


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"starts": torch.zeros(4, dtype=INT)}, ValueError, r"starts is \[4\] int64 on cpu; it must have shape"),
        ({"starts": torch.zeros(5, dtype=torch.int32)}, ValueError, r"starts is \[5\] int32 .* of sizes, \[5\] int64"),
        ({"starts": torch.zeros(5)}, ValueError, r"starts is \[5\] float32"),
        ({"starts": torch.zeros(5, 1, dtype=INT)}, ValueError, r"starts is \[5, 1\] int64"),
        ({"starts": [0] * 5}, TypeError, "starts is .* of type list; a torch.Tensor is accepted"),
        (
            {"sizes": torch.ones(3, 5, dtype=INT)},
            ValueError,
            r"sizes is \[3, 5\]; its shape must be \[E\], or without starts \[1, E\]",
        ),
        (
            {"sizes": torch.ones(1, 5, dtype=INT), "starts": torch.zeros(5, dtype=INT)},
            ValueError,
            r"sizes is \[1, 5\] and starts given",
        ),
        ({"sizes": torch.ones(1, 4, dtype=INT)}, ValueError, r"sizes is .*\[4\].*\[E\] = \[5\]"),
        ({"tails": "zeros"}, ValueError, "tails is 'zeros'; accepted are 'zero' and 'undefined'"),
        ({"expected_rows": -1}, ValueError, "expected_rows is -1; it must not be negative"),
        ({"expected_rows": 1.5}, TypeError, "expected_rows is 1.5"),
        (
            {"rows": torch.zeros(4, 8, 24)},
            ValueError,
            r"sizes is \[5\]; with rows \[4, 8, 24\] its shape must be \[4\]",
        ),
        (
            {"rows": torch.zeros(5, 8, 24), "sizes": torch.ones(5, dtype=torch.bool), "row_weights": None},
            TypeError,
            "sizes has dtype Bool",
        ),
        (
            {"rows": torch.zeros(5, 8, 24), "starts": torch.zeros(5, dtype=INT)},
            ValueError,
            r"starts is given with rows \[5, 8, 24\]",
        ),
        (
            {"rows": torch.zeros(5, 8, 24), "row_weights": torch.zeros(40)},
            ValueError,
            r"row_weights is \[40\]; with rows \[5, 8, 24\] its shape must be \[5, 8\]",
        ),
        ({"rows": torch.zeros(24)}, ValueError, "rows"),
    ],
)
def test_refusals_name_the_argument_its_value_and_the_rule(change, error, message):
    tensors, options = make_rows()
    with pytest.raises(error, match=message):
        moegemm.experts_mlp(**{**tensors, **options, **change})


def test_overlapping_starts_are_named_when_asked(monkeypatch):
    _, (tensors, options), _ = placed_rows(bias=True)
    options["starts"][0] = 10
    monkeypatch.setenv("MOEGEMM_CHECK", "1")
    with pytest.raises(ValueError, match="the rows of expert 0 begin at 10, inside those of expert 2"):
        moegemm.experts_mlp(**tensors, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3, 9, 0, 1, 8], r"^sizes\[1\] is 9; with rows \[E, capacity, H\] it must be at most 8, the capacity"),
        ([3, 0, 0, 1, -4], r"^sizes\[4\] is -4; sizes must not be negative"),
    ],
)
def test_bad_masked_sizes_are_named_when_asked(device, monkeypatch, sizes, message):
    tensors, options = make_rows(device, weighted=False)
    tensors["rows"], options["sizes"] = torch.ones(5, 8, 24, device=device), torch.tensor(sizes, device=device)
    moegemm.experts_mlp(**tensors, **options)
    monkeypatch.setenv("MOEGEMM_CHECK", "1")
    with pytest.raises(ValueError, match=message):
        moegemm.experts_mlp(**tensors, **options)
