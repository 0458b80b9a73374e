"""Weight gradients that are computed apart from the others, when a queue is told to."""

import moegemm
import pytest
import torch
from conftest import FLAGS, make_case
from moegemm.operators.gradients.weight_gradients import WeightGradient
from torch import nn
from torch.utils.checkpoint import checkpoint


def product_call(device: str, flags: str = "plain"):
    """A call, its leaves and which of them are weights."""
    case = make_case(device, flags)
    X, W = case.X.requires_grad_(), nn.Parameter(case.W)
    arguments = {**case.arguments(), "X": X, "W": W}
    return (lambda **options: moegemm.grouped_gemm(**arguments, **options)), [X, W], [W]


def layer_call(device: str, pair: bool = False, bias: bool = True):
    x, ids = torch.randn(9, 8, device=device, requires_grad=True), torch.randint(3, (9, 2), device=device)
    first = [nn.Parameter(torch.randn(3, 6 if pair else 12, 8, device=device)) for _ in range(2 if pair else 1)]
    down = nn.Parameter(torch.randn(3, 8, 6, device=device))
    router = torch.rand(9, 2, device=device, requires_grad=True)
    biases = {"gate_up_bias": nn.Parameter(torch.randn(3, 12, device=device))} if bias else {}

    def call(**options):
        return moegemm.moe_mlp(x, tuple(first) if pair else first[0], down, ids, router, **biases, **options)

    return call, [x, *first, down, router, *biases.values()], [*first, down]


def rows_call(device: str):
    rows, sizes = torch.randn(9, 8, device=device, requires_grad=True), torch.tensor([4, 0, 5], device=device)
    weights = [nn.Parameter(torch.randn(3, 12, 8, device=device)), nn.Parameter(torch.randn(3, 8, 6, device=device))]
    row_weights = torch.rand(9, device=device, requires_grad=True)

    def call(**options):
        return moegemm.experts_mlp(rows, *weights, sizes, row_weights=row_weights, **options)

    return call, [rows, *weights, row_weights], weights


CALLS = {
    **{f"product {flags}": lambda device, flags=flags: product_call(device, flags) for flags in FLAGS},
    "moe_mlp": layer_call,
    "moe_mlp of a pair": lambda device: layer_call(device, pair=True),
    "experts_mlp": rows_call,
}


def gradients(leaves) -> list[torch.Tensor | None]:
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


@pytest.mark.parametrize("name", CALLS)
def test_run_completes_the_same_gradients(device, name):
    call, leaves, weights = CALLS[name](device)
    call().square().sum().backward()
    expected = gradients(leaves)
    queue = moegemm.WeightGradients()
    call(weight_gradients=queue).square().sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [any(leaf is w for w in weights) for leaf in leaves]
    assert len(queue) == 1
    queue.run()
    assert len(queue) == 0
    for got, wanted in zip(gradients(leaves), expected, strict=True):
        assert torch.equal(got, wanted)


def test_microbatches_wait_in_order(device):
    call, leaves, _weights = layer_call(device)
    for scale in (1.0, 3.0):
        (scale * call()).sum().backward()
    expected = gradients(leaves)
    queue = moegemm.WeightGradients()
    for scale in (1.0, 3.0):
        (scale * call(weight_gradients=queue)).sum().backward()
    assert len(queue) == 2
    queue.run(1)
    assert len(queue) == 1
    queue.run()
    for got, wanted in zip(gradients(leaves), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
def test_main_grads_are_added_to_when_it_runs(device, buffer_dtype):
    call, leaves, weights = layer_call(device)
    call().sum().backward()
    expected = [w.grad.clone() for w in weights]
    gradients(leaves)
    for w in weights:
        w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w, dtype=buffer_dtype, requires_grad=False), False
    queue = moegemm.WeightGradients()
    call(accumulate=True, weight_gradients=queue).sum().backward()
    assert not any(w.main_grad.any() or w.grad_added_to_main_grad for w in weights)
    queue.run()
    for w, wanted in zip(weights, expected, strict=True):
        assert torch.equal(w.main_grad, wanted.to(buffer_dtype))
        assert w.grad_added_to_main_grad


def test_hooks_run_with_the_gradient(device):
    call, _leaves, weights = product_call(device)
    seen = []
    weights[0].register_hook(lambda g: seen.append(g.shape))
    weights[0].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    queue = moegemm.WeightGradients()
    call(weight_gradients=queue).sum().backward()
    assert not seen
    queue.run()
    assert seen == [weights[0].shape, True]


@pytest.mark.parametrize("name", CALLS)
def test_weights_alone_fill_it(device, name):
    call, leaves, weights = CALLS[name](device)
    for leaf in leaves:
        leaf.requires_grad_(any(leaf is w for w in weights))
    call().sum().backward()
    expected = gradients(weights)
    queue = moegemm.WeightGradients()
    call(weight_gradients=queue).sum().backward()
    queue.run()
    for got, wanted in zip(gradients(weights), expected, strict=True):
        assert torch.equal(got, wanted)


def test_views_and_casts_of_a_parameter_hand_it_on(device):
    W = nn.Parameter(torch.randn(3, 8, 12, device=device))
    X, sizes = torch.randn(9, 8, device=device), torch.tensor([4, 0, 5], device=device)
    for view in (lambda w: w.transpose(1, 2), lambda w: w.transpose(1, 2).reshape(-1, 8)):
        moegemm.grouped_gemm(X, view(W), sizes, 1).sum().backward()
        expected, W.grad = W.grad, None
        queue = moegemm.WeightGradients()
        moegemm.grouped_gemm(X, view(W), sizes, 1, weight_gradients=queue).sum().backward()
        queue.run()
        assert torch.equal(W.grad, expected)
        W.grad = None


def test_a_sharded_parameter_gets_its_part():
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        X, sizes = torch.randn(9, 8), torch.tensor([4, 0, 5])
        W = nn.Parameter(distribute_tensor(torch.randn(3, 12, 8), DeviceMesh("cpu", [0]), [Shard(0)]))
        moegemm.grouped_gemm(X, W, sizes, 1).sum().backward()
        expected, W.grad = W.grad, None
        queue = moegemm.WeightGradients()
        moegemm.grouped_gemm(X, W, sizes, 1, weight_gradients=queue).sum().backward()
        assert W.grad is None
        queue.run()
        assert torch.equal(W.grad.to_local(), expected.to_local())
    finally:
        torch.distributed.destroy_process_group()


def test_autocast_hands_it_to_the_fp32_parameter(device):
    call, leaves, _weights = layer_call(device, bias=False)
    queue = moegemm.WeightGradients()
    with torch.autocast(device, torch.bfloat16):
        call().sum().backward()
        expected = gradients(leaves)
        call(weight_gradients=queue).sum().backward()
    queue.run()
    for got, wanted in zip(gradients(leaves), expected, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted)


def test_a_checkpointed_layer_fills_it_once(device):
    call, leaves, _weights = layer_call(device)
    call().sum().backward()
    expected = gradients(leaves)
    queue = moegemm.WeightGradients()
    checkpoint(lambda: call(weight_gradients=queue), use_reentrant=False).sum().backward()
    assert len(queue) == 1
    queue.run()
    for got, wanted in zip(gradients(leaves), expected, strict=True):
        assert torch.equal(got, wanted)


def test_frozen_weights_leave_nothing_to_compute(device):
    call, _leaves, weights = layer_call(device)
    for w in weights:
        w.requires_grad_(False)
    queue = moegemm.WeightGradients()
    call(weight_gradients=queue).sum().backward()
    assert len(queue) == 1
    queue.run()
    assert all(w.grad is None for w in weights)


def test_a_parameter_takes_the_gradient_over_without_a_copy(device):
    call, _leaves, weights = product_call(device)
    queue = moegemm.WeightGradients()
    call(weight_gradients=queue).sum().backward()
    made = []
    weights[0].register_hook(lambda g: made.append(g.data_ptr()))
    queue.run()
    assert made == [weights[0].grad.data_ptr()]


def main_grads_of(weights, how: str) -> list[torch.Tensor]:
    """Where their gradients end: made for the purpose, or for None what autograd makes."""
    if how == "grad":
        return []
    buffers = [torch.zeros_like(w, requires_grad=False) for w in weights]
    for w, buffer in zip(weights, buffers, strict=True):
        w.main_grad = buffer
    return buffers


@pytest.mark.parametrize("how", ["grad", "main_grad"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_run_after_an_error_goes_on_with_what_is_left(device, monkeypatch, at, how):
    call, leaves, weights = layer_call(device, bias=False)
    for scale in (1.0, 3.0):
        (scale * call()).sum().backward()
    expected = [w.grad for w in weights]
    gradients(leaves)
    buffers = main_grads_of(weights, how)
    queue, calls = moegemm.WeightGradients(), 0
    for scale in (1.0, 3.0):
        (scale * call(weight_gradients=queue, accumulate=how == "main_grad")).sum().backward()
    own = WeightGradient.compute

    def compute(self, *given):
        nonlocal calls
        calls += 1
        if calls == 3 + at:
            raise RuntimeError("out of memory")
        return own(self, *given)

    monkeypatch.setattr(WeightGradient, "compute", compute)
    with pytest.raises(RuntimeError, match="out of memory"):
        queue.run()
    assert len(queue) == 1
    queue.run()
    assert len(queue) == 0
    for got, wanted in zip(buffers or [w.grad for w in weights], expected, strict=True):
        assert torch.equal(got, wanted)


def test_nothing_is_computed_before_every_buffer_is_there(device):
    call, _leaves, weights = layer_call(device, bias=False)
    call().sum().backward()
    expected = [w.grad.clone() for w in weights]
    buffers = [torch.zeros_like(w, requires_grad=False) for w in weights]
    weights[0].main_grad, late = buffers[0], []
    weights[1].get_main_grad = late.pop
    weights[1].grad_added_to_main_grad = False
    queue = moegemm.WeightGradients()
    call(accumulate=True, weight_gradients=queue).sum().backward()
    with pytest.raises(IndexError):
        queue.run()
    assert len(queue) == 1
    assert not any(buffer.any() for buffer in buffers)
    late.append(buffers[1])
    queue.run()
    for got, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(got, wanted)


def computed_weight(device: str):
    """Two layers of a loss that share a weight which is no parameter."""
    p, scale = nn.Parameter(torch.randn(3, 12, 8, device=device)), nn.Parameter(torch.ones((), device=device))
    rows, sizes = torch.randn(9, 8, device=device), torch.tensor([4, 0, 5], device=device)
    down, w = torch.randn(3, 8, 6, device=device), p * scale

    def layers(**options) -> list[torch.Tensor]:
        return [moegemm.experts_mlp(rows * i, w, down, sizes, **options).sum() for i in (1.0, 2.0, 3.0)]

    return layers, [p, scale], w


@pytest.mark.parametrize("steps", [[None], [1, 1, 1], [2, None]])
def test_layers_may_share_a_weight_that_is_computed(device, steps):
    layers, leaves, w = computed_weight(device)
    sum(layers()).backward(retain_graph=True)
    expected = gradients(leaves)
    queue = moegemm.WeightGradients()
    sum(layers(weight_gradients=queue)).backward()
    assert len(queue) == 3
    for calls in steps:
        queue.run(calls)
    for got, wanted in zip(gradients(leaves), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match="second time"):  # the last one let go of what made the weight
        w.sum().backward()


def test_a_computed_weight_gets_its_gradient_once_after_an_error(device, monkeypatch):
    layers, leaves, _w = computed_weight(device)
    layers()[0].backward(retain_graph=True)
    expected = gradients(leaves)
    queue = moegemm.WeightGradients()
    layers(weight_gradients=queue)[0].backward()
    with monkeypatch.context() as patched:
        patched.setattr(WeightGradient, "compute", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.run()
    queue.run()
    for got, wanted in zip(gradients(leaves), expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_queue_that_was_not_filled_is_refused():
    with pytest.raises(RuntimeError, match="weight_gradients was not filled: 0 backward passes wait in it; run"):
        moegemm.WeightGradients().run()


def test_a_queue_that_was_run_is_refused_until_it_is_filled_again(device):
    call, _leaves, weights = product_call(device)
    queue = moegemm.WeightGradients()
    for _ in range(2):
        call(weight_gradients=queue).sum().backward()
        queue.run()
        kept = weights[0].grad.clone()
        with pytest.raises(RuntimeError, match="weight_gradients was run already: 0 backward passes wait"):
            queue.run()
        assert torch.equal(weights[0].grad, kept)


@pytest.mark.parametrize("calls", [0, -1, 2])
def test_more_than_wait_are_refused(device, calls):
    call, _leaves, _weights = product_call(device)
    queue = moegemm.WeightGradients()
    call(weight_gradients=queue).sum().backward()
    with pytest.raises(ValueError, match=f"calls is {calls}; 1 backward passes wait, so 1 to 1 are accepted"):
        queue.run(calls)
    with pytest.raises(TypeError, match="calls is True of type bool; an int or None is accepted"):
        queue.run(True)
    queue.run(1)


@pytest.mark.parametrize("name", ["product plain", "moe_mlp", "experts_mlp"])
def test_what_is_no_queue_is_refused(name):
    call, _leaves, _weights = CALLS[name]("cpu")
    with pytest.raises(TypeError, match=r"weight_gradients is \[\] of type list; a moegemm.WeightGradients or None"):
        call(weight_gradients=[])


def test_what_waits_may_not_be_written_to(device):
    case = make_case(device)
    W = case.W.requires_grad_()
    queue = moegemm.WeightGradients()
    moegemm.grouped_gemm(**case.arguments(), weight_gradients=queue).sum().backward()
    case.X.zero_()
    with pytest.raises(RuntimeError, match=r"waits for a tensor of shape \[26, 40\] that was written in place"):
        queue.run()
    assert W.grad is None


def test_compiling_is_refused(device):
    call, _leaves, _weights = product_call(device)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="only eager calls leave gradients for later"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(weight_gradients=moegemm.WeightGradients())
