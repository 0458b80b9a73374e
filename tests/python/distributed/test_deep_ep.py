"""DeepEP's compact layout through an emulation of its buffers on gloo: the interface of `Buffer` (1) and of
`ElasticBuffer` (2), with garbage wherever they leave memory as it was."""

from types import SimpleNamespace

import moegemm
import pytest
import torch
import torch.distributed as dist
from distributed.cases import BY_NAME, build
from distributed.test_bits import make_adapters, run, run_adapted
from distributed.test_dispatchers import refusal, repeated_expert
from moegemm.distributed import DeepEP, expert_parallel_mlp


class Emulated:
    """What both buffers do: a token once to each rank that has an expert for it, sums on the way back."""

    def __init__(self) -> None:
        self.group_size = self.num_ranks = dist.get_world_size()

    def _plan(self, ids: torch.Tensor, num_experts: int) -> SimpleNamespace:
        here = num_experts // self.num_ranks
        owners = torch.where((ids >= 0) & (ids < num_experts), ids // here, -1)
        tokens = [(owners == rank).any(1).nonzero().view(-1) for rank in range(self.num_ranks)]
        sizes = torch.tensor([len(t) for t in tokens])
        received = torch.empty_like(sizes)
        dist.all_to_all_single(received, sizes)
        return SimpleNamespace(
            tokens=tokens,
            sent=sizes.tolist(),
            received=received.tolist(),
            count=ids.size(0),
            here=here,
            experts=num_experts,
        )

    def _there(self, plan: SimpleNamespace, rows: torch.Tensor) -> torch.Tensor:
        arrived = rows.new_empty((sum(plan.received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows[torch.cat(plan.tokens)].contiguous(), plan.received, plan.sent)
        return arrived

    def _local_ids(self, plan: SimpleNamespace, ids: torch.Tensor) -> torch.Tensor:
        everyone = self._there(plan, ids)
        mine = everyone // plan.here == dist.get_rank()
        return torch.where(mine & (everyone >= 0), everyone % plan.here, -1)

    def _home(self, plan: SimpleNamespace, rows: torch.Tensor) -> torch.Tensor:
        rows = rows[: sum(plan.received)].contiguous()
        back = rows.new_empty((sum(plan.sent), *rows.shape[1:]))
        dist.all_to_all_single(back, rows, plan.sent, plan.received)
        return rows.new_zeros((plan.count, *rows.shape[1:])).index_add(0, torch.cat(plan.tokens), back)

    def combine(self, x, handle=None, topk_weights=None):
        home = None if topk_weights is None else self._home(handle, topk_weights)
        return self._home(handle, x), home, None


class Buffer(Emulated):
    def get_dispatch_layout(self, topk_idx, num_experts):
        self.num_experts = num_experts
        return None, None, None, None, None

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None,
    ):  # fmt: skip
        if handle is not None:
            return self._there(handle, x), None, None, None, None, None
        plan = self._plan(topk_idx, self.num_experts)
        ids = self._local_ids(plan, topk_idx)
        return self._there(plan, x), ids, self._there(plan, topk_weights), [0], plan, None


class ElasticBuffer(Emulated):
    """Without a sync everything has room for all tokens of all ranks, and what is past the real rows is not written."""

    ROOM = 64

    def _with_room(self, rows: torch.Tensor, garbage: float) -> torch.Tensor:
        wide = rows.new_full((self.ROOM, *rows.shape[1:]), garbage)
        wide[: len(rows)] = rows
        return wide

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, num_experts=None, handle=None, do_expand=False, do_cpu_sync=None
    ):
        assert not do_expand
        if handle is not None:
            rows = self._there(handle, x)
            return (rows if handle.sync else self._with_room(rows, float("nan"))), None, None, handle, None
        plan = self._plan(topk_idx, num_experts)
        plan.sync = do_cpu_sync
        plan.psum_num_recv_tokens_per_scaleup_rank = torch.tensor(plan.received).cumsum(0).int()
        rows, ids, weights = self._there(plan, x), self._local_ids(plan, topk_idx), self._there(plan, topk_weights)
        if do_cpu_sync:
            return rows, ids, weights, plan, None
        return (
            self._with_room(rows, float("nan")),
            self._with_room(ids, 1),
            self._with_room(weights, float("nan")),
            plan,
            None,
        )


NAMES = ["random", "all to one expert", "a rank without tokens", "a rank that receives nothing", "topk 1", "biases"]


def far_from_one_process(kind: str, synchronise: bool) -> dict[str, float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    far = {}
    for name in NAMES:
        layer = build(BY_NAME[name], size, torch.float32)
        expected = run(layer, slice(None), slice(None), moegemm.moe_mlp)
        dispatcher = DeepEP(globals()[kind](), 8, synchronise=synchronise)
        tokens, experts = layer.tokens_of(rank), layer.experts_of(rank)
        found = run(layer, tokens, experts, lambda *t, d=dispatcher, **o: expert_parallel_mlp(*t, dispatcher=d, **o))
        for what, value in found.items():
            whole = expected[what][tokens if what in ("out", "d x", "d router_weights") else experts]
            far[f"{name}: {what}"] = float((value - whole).norm() / whole.norm().clamp(min=1e-6))
    return far


@pytest.mark.parametrize(("kind", "synchronise"), [("Buffer", True), ("ElasticBuffer", True), ("ElasticBuffer", False)])
def test_a_layer_over_deep_eps_buffers_is_that_of_one_process(ranks, kind, synchronise):
    for far in ranks(2).run(far_from_one_process, kind, synchronise):
        assert all(each < 2e-6 for each in far.values()), far  # NaN fails


def repeated_expert_over(kind: str, synchronise: bool) -> float:
    return repeated_expert(DeepEP(globals()[kind](), 2, synchronise=synchronise))


@pytest.mark.parametrize(("kind", "synchronise"), [("Buffer", True), ("ElasticBuffer", True)])
def test_no_slot_of_a_repeated_expert_is_lost(ranks, kind, synchronise):
    assert max(ranks(2).run(repeated_expert_over, kind, synchronise)) < 1e-5


def adapters_far_from_one_process(kind: str, synchronise: bool, dropout: float) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = build(BY_NAME["biases"], size, torch.float32)
    tokens, experts = layer.tokens_of(rank), layer.experts_of(rank)
    whole, mine = make_adapters(experts, torch.float32, dropout)
    expected = run_adapted(layer, moegemm.lora_moe_mlp, slice(None), slice(None), whole)
    dispatcher = DeepEP(globals()[kind](), 8, synchronise=synchronise)
    found = run_adapted(layer, expert_parallel_mlp, tokens, experts, mine, dispatcher=dispatcher)
    pairs = [(a, b[tokens]) for a, b in zip(found[:3], expected[:3], strict=True)]
    pairs += [(a, b[experts]) for a, b in zip(found[3], expected[3], strict=True)]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "synchronise"), [("Buffer", True), ("ElasticBuffer", True), ("ElasticBuffer", False)])
def test_adapters_over_deep_eps_buffers_are_those_of_one_process(ranks, kind, synchronise, dropout):
    for far in ranks(2).run(adapters_far_from_one_process, kind, synchronise, dropout):
        assert all(each < (2.0 if dropout else 2e-6) for each in far), far  # NaN fails


def refusals() -> list[str]:
    x, ids, weights = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    dispatcher = DeepEP(Buffer(), 8)
    sent = dispatcher.dispatch(x, ids, weights)
    dispatcher.combine(sent.rows, sent)
    return [
        refusal(lambda: dispatcher.combine(sent.rows, sent)),
        refusal(lambda: DeepEP(Buffer(), 7)),
        refusal(lambda: DeepEP(Buffer(), 8, synchronise=False)),
    ]


def test_what_deep_ep_cannot_do_is_refused(ranks):
    for twice, experts, waits in ranks(2).run(refusals):
        assert "one combine per dispatch" in twice
        assert "num_experts is 7; it must be a multiple of the 2 ranks" in experts
        assert "deep_ep.Buffer waits for sizes" in waits
