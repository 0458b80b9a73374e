"""How often a call waits for its device, and what torch.compile and one GPU make of it."""

import os

import moegemm
import pytest
import torch
import torch.distributed as dist
from conftest import NO_CUDA
from distributed.cases import BY_NAME, build, leaf
from distributed.test_bits import all_differences, run
from moegemm.distributed import AllToAll, expert_parallel_mlp


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Operators that need a tensor's values on the host."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name.rstrip("_") in self.NAMES or (name == "repeat_interleave" and not (kwargs or {}).get("output_size")):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def lists_read(of_dispatcher: dict) -> tuple[int, int, list[str]]:
    """Calls of Tensor.tolist in forward and backward, and other operators that wait."""
    layer = build(BY_NAME["random"], dist.get_world_size(), torch.float32)
    mine, experts = layer.tokens_of(dist.get_rank()), layer.experts_of(dist.get_rank())
    dispatcher = AllToAll(None, 8, **of_dispatcher)
    dispatcher._compares = lambda arriving: False  # as on a GPU after the first call: there nothing is compared
    x, weights = leaf(layer.x[mine]), leaf(layer.router_weights[mine])
    stacks = leaf(layer.w_gate_up[experts]), leaf(layer.w_down[experts])
    read = []
    whole = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch, Waits() as waits:
        patch.setattr(torch.Tensor, "tolist", lambda self: (read.append(1), whole(self))[1])
        out = expert_parallel_mlp(x, *stacks, layer.ids[mine], weights, dispatcher=dispatcher)
        forward = len(read)
        out.backward(layer.d_out[mine])
    return forward, len(read) - forward, waits.found


@pytest.mark.parametrize(("of_dispatcher", "forward"), [
    ({}, 1), ({"unique": True}, 1), ({"rows_per_peer": 64}, 0), ({"rows_per_peer": 64, "unique": True}, 0),
])  # fmt: skip
def test_one_wait_forward_and_none_with_room_or_in_the_backward(ranks, of_dispatcher, forward):
    assert ranks(2).run(lists_read, of_dispatcher) == [(forward, 0, [])] * 2


def compiled(of_dispatcher: dict) -> bool:
    """One graph, forward and backward, with the bits of the eager call."""
    layer = build(BY_NAME["random"], dist.get_world_size(), torch.float32)
    mine, experts = layer.tokens_of(dist.get_rank()), layer.experts_of(dist.get_rank())
    dispatcher = AllToAll(None, 8, **of_dispatcher)

    def call(*tensors, **options):
        return expert_parallel_mlp(*tensors, dispatcher=dispatcher, **options)

    expected = run(layer, mine, experts, call)
    torch._dynamo.reset()
    found = run(layer, mine, experts, torch.compile(call, backend="aot_eager", fullgraph=True))
    return all(torch.equal(value, expected[name]) for name, value in found.items())


def test_a_call_with_room_compiles_into_one_graph(ranks):
    assert ranks(2).run(compiled, {"rows_per_peer": 64}) == [True, True]


def compiled_at_once() -> bool:
    """The first call of a group, which makes its dispatcher."""
    layer = build(BY_NAME["random"], dist.get_world_size(), torch.float32)
    mine, experts = layer.tokens_of(dist.get_rank()), layer.experts_of(dist.get_rank())
    group = dist.new_group()
    call = torch.compile(lambda *tensors: expert_parallel_mlp(*tensors, mesh=group), backend="aot_eager")
    own = layer.x[mine], layer.w_gate_up[experts], layer.w_down[experts], layer.ids[mine], layer.router_weights[mine]
    return torch.equal(call(*own), expert_parallel_mlp(*own, mesh=group))


def test_the_first_call_of_a_group_may_be_compiled(ranks):
    assert ranks(2).run(compiled_at_once) == [True, True]


def on_one_gpu(names: list[str], dtype: str, of_dispatcher: dict) -> dict[str, list[str]]:
    torch.cuda.set_device(0)
    return all_differences(names, dtype, "cuda", of_dispatcher)


@NO_CUDA
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("of_dispatcher", [{}, {"rows_per_peer": 700}], ids=["exact splits", "room for all"])
def test_processes_that_share_a_gpu_have_the_bits_of_one(ranks, dtype, of_dispatcher):
    """gloo copies the rows through the host: the kernels are those of a GPU, the exchange is not."""
    assert ranks(2).run(on_one_gpu, list(BY_NAME), dtype, of_dispatcher, seconds=200) == [{}, {}]


@pytest.fixture
def nccl():
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_nccl(of_dispatcher: dict, case: str = "random", dtype: torch.dtype = torch.bfloat16):
    layer = build(BY_NAME[case], 1, dtype, "cuda")
    dispatcher = AllToAll(None, layer.case.experts, **of_dispatcher)
    return (
        layer,
        dispatcher,
        lambda *tensors, **options: expert_parallel_mlp(*tensors, dispatcher=dispatcher, **options),
    )


@NO_CUDA
@pytest.mark.parametrize("of_dispatcher", [{}, {"rows_per_peer": 700}], ids=["exact splits", "room for all"])
@pytest.mark.parametrize("case", list(BY_NAME))
def test_nccl_with_one_rank_has_the_bits_of_the_plain_layer(nccl, case, of_dispatcher):
    layer, _, call = on_nccl(of_dispatcher, case)
    found, expected = run(layer, slice(None), slice(None), call), run(layer, slice(None), slice(None), moegemm.moe_mlp)
    for name, value in found.items():
        assert value is expected[name] is None or torch.equal(value, expected[name]), name


@NO_CUDA
def test_a_call_with_room_never_waits_for_the_gpu(nccl):
    layer, dispatcher, call = on_nccl({"rows_per_peer": 64})
    run(layer, slice(None), slice(None), call)  # compares settings once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(layer, slice(None), slice(None), call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    dispatcher.check()


@NO_CUDA
def test_a_call_with_exact_splits_waits_once(nccl, recwarn):
    layer, _, call = on_nccl({})
    run(layer, slice(None), slice(None), call)
    torch.cuda.synchronize()
    recwarn.clear()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        run(layer, slice(None), slice(None), call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(warning.message) for warning in recwarn) == 1


@NO_CUDA
def test_a_cuda_graph_replays_with_other_tokens(nccl):
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
        pytest.skip("NCCL waits on the host")
    layer, dispatcher, call = on_nccl({"rows_per_peer": 64})
    x, ids, weights = layer.x.clone(), layer.ids.clone(), layer.router_weights.clone()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            call(x, layer.w_gate_up, layer.w_down, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = call(x, layer.w_gate_up, layer.w_down, ids, weights)
    ids.copy_(ids.flip(0))
    x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, moegemm.moe_mlp(x, layer.w_gate_up, layer.w_down, ids, weights))
    dispatcher.check()
