"""The adapters of other libraries on stand-ins that have their signatures and do their work with torch."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import moegemm
import pytest
import torch
from moegemm.bench import contenders, peers
from moegemm.bench.cases import OPS, Case, Model
from moegemm.bench.measure import Measurement, Settings
from moegemm.bench.operands import Operands, make_operands, make_weights
from moegemm.bench.pages import report
from moegemm.bench.timing import Clock

MODEL = Model("tiny", experts=5, topk=2, hidden=48, intermediate=40)


def operands(op: str) -> Operands:
    case = Case(MODEL, 21, "random", op)
    weights = None if case.product == "dW" else make_weights(case, "cpu", torch.bfloat16)
    return make_operands(case, weights, "cpu", torch.bfloat16, seed=1)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Puts a module and the packages above it into sys.modules."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        if length == len(parts) or path not in sys.modules:
            module = ModuleType(path)
            module.__spec__ = importlib.machinery.ModuleSpec(path, None)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


def per_expert(rows: torch.Tensor, weights: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """[M, K] x [E, K, N], rows in expert order."""
    parts = zip(rows.float().split(sizes), weights.float(), strict=True)
    return torch.cat([part @ w for part, w in parts]).to(rows.dtype)


def scattermoe(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel_linear(
        inputs, expert_weights, k, sorted_expert_idxs, sorted_scattered_idxs, expert_offsets,
        expert_biases=None, gates=None, grouped_in=False, grouped_out=False,
    ):  # fmt: skip
        sizes = expert_offsets.diff(prepend=expert_offsets.new_zeros(1)).tolist()
        assert torch.equal(sorted_expert_idxs, torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)))
        rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
        y = per_expert(rows, expert_weights, sizes)
        return y if grouped_out else torch.empty_like(y).index_copy_(0, sorted_scattered_idxs, y)

    install(monkeypatch, "scattermoe.parallel_experts", parallel_linear=parallel_linear)


def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_ragged_tensor_metadata(slice_sizes, n_total_rows):
        assert slice_sizes.dtype == torch.int32
        assert int(slice_sizes.sum()) == n_total_rows
        return SimpleNamespace(slice_sizes=slice_sizes)

    def matmul(
        a, b, bias, a_ragged_metadata=None, b_ragged_metadata=None, gather_indx=None, scatter_indx=None,
        precision_config=None, betas=None, gammas=None, out_alpha=None, c=None,
    ):  # fmt: skip
        assert bias is None
        assert all(indices is None or indices.dtype == torch.int32 for indices in (gather_indx, scatter_indx))
        rows = a if gather_indx is None else a[gather_indx.long()]
        y = per_expert(rows, b, a_ragged_metadata.slice_sizes.tolist())
        y = y if gammas is None else (y.float() * gammas[:, None]).to(y.dtype)
        return y if scatter_indx is None else torch.empty_like(y).index_copy_(0, scatter_indx.long(), y)

    install(monkeypatch, "triton_kernels.tensor", make_ragged_tensor_metadata=make_ragged_tensor_metadata)
    install(monkeypatch, "triton_kernels.matmul", matmul=matmul)


def matmul_ogs(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = {
        "RoutingData": lambda *fields: SimpleNamespace(sizes=fields[1], topk=fields[3], expert_data=fields[4]),
        "GatherIndx": lambda src, dst: SimpleNamespace(src_indx=src, dst_indx=dst),
        "compute_expt_data": lambda sizes, experts, rows: (sizes, experts, rows),
    }
    install(monkeypatch, "triton_kernels.routing", **routing)

    def run(x, w, bias, routing_data=None, gather_indx=None, scatter_indx=None):
        rows = x[gather_indx.src_indx.long() // routing_data.topk]
        assert torch.equal(gather_indx.dst_indx.long(), gather_indx.src_indx.long().argsort())
        return per_expert(rows, w, routing_data.sizes.tolist())

    install(monkeypatch, "triton_kernels.matmul_ogs", matmul_ogs=run)


def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    alignment = 8

    def contiguous(a, b, d, grouped_layout):
        assert grouped_layout.dtype == torch.int32
        assert a.size(0) % alignment == 0
        for begin in range(0, a.size(0), alignment):
            block = grouped_layout[begin : begin + alignment]
            (expert,) = set(block[block >= 0].tolist())
            d[begin : begin + alignment] = (a[begin : begin + alignment].float() @ b[expert].float()).to(d.dtype)

    install(
        monkeypatch,
        "deep_gemm",
        m_grouped_bf16_gemm_nt_contiguous=lambda a, b, d, layout: contiguous(a, b.transpose(1, 2), d, layout),
        m_grouped_bf16_gemm_nn_contiguous=contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: alignment,
        __version__="2.8.0",
    )


def sonicmoe(monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(A, B, out=None, bias=None, alpha=1.0, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, tuned=True):
        assert cu_seqlens_m.dtype == torch.int32
        assert A_idx is None or A_idx.dtype == torch.int32
        rows = A if A_idx is None else A[A_idx.long()]
        return per_expert(rows, B, cu_seqlens_m.diff().tolist())

    install(monkeypatch, "sonicmoe")
    install(monkeypatch, "quack.gemm_interface", gemm=gemm)


class UnslothCalls(list[dict[str, Any]]):
    """Ours has the interface of theirs: it does the work, and the arguments are kept."""

    def function(self, name: str) -> Any:
        def call(**arguments: Any) -> torch.Tensor:
            self.append(arguments)
            known = {k: v for k, v in arguments.items() if not k.startswith(("BLOCK", "num_", "autotune"))}
            return getattr(moegemm, name)(**known)

        return call


def unsloth(monkeypatch: pytest.MonkeyPatch) -> UnslothCalls:
    calls = UnslothCalls()
    functions = {name: calls.function(name) for name in ("grouped_gemm_forward", "grouped_gemm_dX", "grouped_gemm_dW")}
    install(monkeypatch, "unsloth.kernels.moe.grouped_gemm.interface", **functions)
    blocks = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "num_warps": 8, "num_stages": 3}

    def get_or_autotune_moe_kernels(num_experts, hidden_dim, intermediate_dim, top_k, dtype):
        assert (num_experts, hidden_dim, intermediate_dim, top_k) == (5, 48, 40, 2)
        return tuple(SimpleNamespace(**blocks | {"num_stages": stages}) for stages in (3, 4, 5))

    install(monkeypatch, "unsloth.kernels.moe.autotune_cache", get_or_autotune_moe_kernels=get_or_autotune_moe_kernels)
    return calls


STAND_INS = {
    "scattermoe": (scattermoe, ("fwd1", "fwd2")),
    "triton_kernels": (triton_kernels, ("fwd1", "fwd2", "dx1", "dx2")),
    "triton_kernels before": (matmul_ogs, ("fwd1",)),
    "deep_gemm": (deep_gemm, ("fwd1", "fwd2", "dx1", "dx2")),
    "sonicmoe": (sonicmoe, ("fwd1", "fwd2", "dx1", "dx2")),
    "unsloth": (unsloth, OPS),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_adapters_compute_the_products_they_offer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, offered = STAND_INS[name]
    stand_in(monkeypatch)
    found = peers.importable_peers().found
    peer = found[name.split()[0]]
    assert set(peer.ops) == set(offered)
    for op in peer.ops:
        made = operands(op)
        checked = contenders.check(peer.make(made))
        assert checked["correct"], (op, checked)


def test_untuned_unsloth_gets_the_configs_of_its_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_MOE_DISABLE_AUTOTUNE", "0")
    calls = unsloth(monkeypatch)
    tuned = peers.importable_peers().found["unsloth"]
    tuned.make(operands("fwd2")).run()
    assert calls[-1]["autotune"]
    assert calls[-1]["fuse_mul_post"]
    untuned = peers.importable_peers(tuned=False).found["unsloth"]
    for op, stages in (("fwd1", 3), ("dx1", 4), ("dw2", 5)):
        untuned.make(operands(op)).run()
        assert calls[-1]["num_stages"] == stages
        assert calls[-1]["BLOCK_SIZE_N"] == 128
        assert "autotune" not in calls[-1]


def test_what_cannot_be_imported_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    deep_gemm(monkeypatch)
    for name in ("unsloth", "scattermoe", "triton_kernels", "sonicmoe"):
        monkeypatch.setitem(sys.modules, name, None)
    known = peers.importable_peers()
    assert list(known.found) == ["deep_gemm"]
    assert known.versions == {"deep_gemm": "2.8.0"}
    assert set(known.missing) == {"unsloth", "scattermoe", "triton_kernels", "sonicmoe"}
    assert "unsloth" in known.missing["unsloth"]
    said = {"found": known.versions, "missing": known.missing, "tuned": False}
    text = "\n".join(report.peer_lines({"peers": said}))
    assert "deep_gemm 2.8.0, with their heuristics' configs, not tuned" in text
    assert "not run: unsloth, scattermoe, triton_kernels, sonicmoe" in text
    assert report.peer_lines({}) == []


def test_a_library_that_fails_without_a_word_ends_no_measurement() -> None:
    def fail() -> torch.Tensor:
        raise AssertionError

    def make(o: Operands) -> contenders.Contender:
        return contenders.Contender(fail, lambda y: 0.0)

    found = peers.Peers({"mute": peers.Peer(OPS, make)}, {}, {})
    settings = Settings("cpu", torch.bfloat16, 1, False, found, deadline=float("inf"))
    entry = Measurement(settings, Clock("cpu", flush=False)).measure(Case(MODEL, 21, "random", "fwd1"))
    assert entry["contenders"]["mute"]["failure"] == "AssertionError: no reason given"
    assert entry["contenders"]["ours"]["correct"]
