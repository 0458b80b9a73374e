"""Other libraries, where they are installed. Each gets the operands in the layout it is best at; what its user computes
once per layer (sorted indices, offsets, padded rows' places) is not charged, copies of rows are."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moegemm.bench.contenders import Contender
from moegemm.bench.operands import Operands, relative_error

FORWARD = ("fwd1", "fwd2")
PADDED_ROWS = 128  # DeepGEMM's segments begin at multiples of this


@dataclass(frozen=True)
class Peer:
    ops: tuple[str, ...]
    make: Callable[[Operands], Contender]


def _contender(o: Operands, run: Callable[[], Tensor]) -> Contender:
    return Contender(run, lambda y: relative_error(o, y, with_empty=False), roundings=3)


def _unsloth(module: Any) -> Peer:
    """The Triton kernels whose interface ours follows, with their own tuning."""

    def make(o: Operands) -> Contender:
        r, topk = o.routing, o.case.model.topk
        first = o.case.op.endswith("1")
        flags: dict[str, Any] = {"permute_x": first, "permute_y": not first, "autotune": True}
        if o.case.product == "forward":
            more = {} if o.topk_weights is None else {"topk_weights": o.topk_weights, "fuse_mul_post": True}
            return _contender(
                o,
                lambda: module.grouped_gemm_forward(
                    X=o.X, W=o.W, topk=topk, m_sizes=r.m_sizes, gather_indices=r.gather_indices, **flags, **more
                ),
            )
        if o.case.product == "dX":
            return _contender(
                o,
                lambda: module.grouped_gemm_dX(
                    dY=o.dY, W=o.W, gather_indices=r.gather_indices, m_sizes=r.m_sizes, topk=topk, **flags
                ),
            )
        return _contender(
            o,
            lambda: module.grouped_gemm_dW(
                X=o.X, dY=o.dY, m_sizes=r.m_sizes, gather_indices=r.gather_indices, topk=topk, **flags
            ),
        )

    return Peer(("fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2"), make)


def _scattermoe(module: Any) -> Peer:
    """parallel_linear: gathers from or scatters to flat order. Weights are [E, K, N]: a view of ours."""

    def make(o: Operands) -> Contender:
        assert o.W is not None
        r, topk = o.routing, o.case.model.topk
        experts = r.expert_ids.reshape(-1)[r.gather]
        known = {
            "sorted_expert_idxs": experts,
            "sorted_scattered_idxs": r.gather,
            "expert_offsets": r.ends.long(),
            "grouped_in": o.case.op == "fwd2",
            "grouped_out": o.case.op == "fwd1",
        }
        accepted = inspect.signature(module.parallel_linear).parameters
        if "padded_block_idxs" in accepted:
            known["padded_block_idxs"] = importlib.import_module("scattermoe.kernels.ops").padded_block_indices(
                experts, o.case.model.experts
            )[0]
        w = o.W.transpose(1, 2)
        k = topk if o.case.op == "fwd1" else 1
        weights = None if o.topk_weights is None else o.topk_weights.to(o.out.dtype)[:, None]

        def run() -> Tensor:
            y: Tensor = module.parallel_linear(o.X, w, k, **known)
            return y if weights is None else y * weights

        return _contender(o, run)

    return Peer(FORWARD, make)


def _triton_kernels(module: Any) -> Peer:
    """matmul_ogs with its own routing types; rows come from flat order or go there."""
    routing_module = importlib.import_module("triton_kernels.routing")

    def make(o: Operands) -> Contender:
        assert o.W is not None
        r, model = o.routing, o.case.model
        gather, inverse = r.gather_indices, r.inverse.int()
        data = routing_module.RoutingData(
            None,
            r.m_sizes,
            model.experts,
            model.topk,
            routing_module.compute_expt_data(r.m_sizes, model.experts, o.case.rows),
        )
        w = o.W.transpose(1, 2)
        kwargs: dict[str, Any] = {}
        if o.case.op == "fwd1":
            kwargs["gather_indx"] = routing_module.GatherIndx(gather, inverse)
        else:
            kwargs["scatter_indx"] = routing_module.ScatterIndx(inverse, gather)
        return _contender(o, lambda: module.matmul_ogs(o.X, w, None, data, **kwargs))

    # Its scatter also sums over the slots of a token: only the first product is the same operation.
    return Peer(("fwd1",), make)


def _deep_gemm(module: Any) -> Peer:
    """Contiguous grouped layout: rows are copied to segments that begin at multiples of 128, and back."""

    def make(o: Operands) -> Contender:
        assert o.W is not None
        r, device = o.routing, o.out.device
        padded_sizes = [-(-size // PADDED_ROWS) * PADDED_ROWS for size in r.sizes]
        padded_rows = sum(padded_sizes)
        layout = torch.full((padded_rows,), -1, dtype=torch.int32, device=device)
        place = torch.empty(o.case.rows, dtype=torch.int64, device=device)
        target = 0
        for (expert, begin, end), padded in zip(r.segments(), padded_sizes, strict=True):
            layout[target : target + end - begin] = expert
            place[begin:end] = torch.arange(target, target + end - begin, device=device)
            target += padded
        source = o.X if o.case.op == "fwd2" else o.dY if o.case.product == "dX" else None
        if o.case.op == "dx2":
            source_rows = r.gather
        elif o.case.op == "fwd1":
            source, source_rows = o.X, r.token_of_row
        else:
            source_rows = torch.arange(o.case.rows, device=device)
        assert source is not None
        rows_of_padded = torch.zeros(padded_rows, dtype=torch.int64, device=device)
        rows_of_padded[place] = source_rows
        flat_place = place[r.inverse] if o.case.op in ("fwd2", "dx1") else place
        forward = o.case.product == "forward"
        gemm = module.m_grouped_bf16_gemm_nt_contiguous if forward else module.m_grouped_bf16_gemm_nn_contiguous
        out = torch.empty(padded_rows, o.out.size(1), device=device, dtype=o.out.dtype)
        weights = None if o.topk_weights is None else o.topk_weights.to(o.out.dtype)[:, None]
        kept_source = source

        def run() -> Tensor:
            gemm(kept_source.index_select(0, rows_of_padded), o.W, out, layout)
            y = out.index_select(0, flat_place)
            return y if weights is None else y.mul_(weights)

        return _contender(o, run)

    return Peer(("fwd1", "fwd2", "dx1", "dx2"), make)


def _quack(module: Any) -> Peer:
    """The grouped product under SonicMoE: gathers rows itself, scatters nothing."""

    def make(o: Operands) -> Contender:
        assert o.W is not None
        r = o.routing
        starts = torch.nn.functional.pad(r.ends, (1, 0)).int()
        forward = o.case.product == "forward"
        rows = o.X if forward else o.dY
        w = o.W.transpose(1, 2) if forward else o.W
        gathered = {"fwd1": r.token_of_row.int(), "dx2": r.gather_indices}.get(o.case.op)
        weights = None if o.topk_weights is None else o.topk_weights.to(o.out.dtype)[:, None]

        def run() -> Tensor:
            y: Tensor = module.gemm(rows, w, cu_seqlens_m=starts, A_idx=gathered)
            if o.case.op in ("fwd1", "dx2"):
                return y
            y = y.index_select(0, r.inverse)
            return y if weights is None else y.mul_(weights)

        return _contender(o, run)

    return Peer(("fwd1", "fwd2", "dx1", "dx2"), make)


# Name in the tables, modules that must be importable (the last one is used), adapter.
_KNOWN: tuple[tuple[str, tuple[str, ...], Callable[[Any], Peer]], ...] = (
    ("unsloth", ("unsloth.kernels.moe.grouped_gemm.interface",), _unsloth),
    ("scattermoe", ("scattermoe.parallel_experts",), _scattermoe),
    ("triton_kernels", ("triton_kernels.matmul_ogs",), _triton_kernels),
    ("deep_gemm", ("deep_gemm",), _deep_gemm),
    ("sonicmoe", ("sonicmoe", "quack.gemm_interface"), _quack),
)


def importable_peers() -> dict[str, Peer]:
    """Those that are installed and load. One that does not load is as good as absent."""
    found: dict[str, Peer] = {}
    for name, modules, adapt in _KNOWN:
        try:
            loaded = [importlib.import_module(module) for module in modules]
            found[name] = adapt(loaded[-1])
        except Exception:
            continue
    return found
