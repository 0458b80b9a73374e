"""Other libraries, where they are installed. Each gets the operands in the layout it is best at; what its user computes
once per layer (sorted indices, offsets, padded rows' places) is not charged, copies of rows are."""

import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from moegemm.bench.contenders import Contender
from moegemm.bench.operands import Operands, relative_error

FORWARD = ("fwd1", "fwd2")
PADDED_ROWS = 128  # DeepGEMM's segments begin at multiples of this where it does not say


@dataclass(frozen=True)
class Peer:
    ops: tuple[str, ...]
    make: Callable[[Operands], Contender]


def _contender(o: Operands, run: Callable[[], Tensor]) -> Contender:
    return Contender(run, lambda y: relative_error(o, y, with_empty=False), roundings=3)


def _unsloth(module: Any, tuned: bool) -> Peer:
    """The Triton kernels whose interface ours follows, with their own tuning or their heuristic's configs."""
    if not tuned:
        os.environ["UNSLOTH_MOE_DISABLE_AUTOTUNE"] = "1"

    def config_of(o: Operands) -> dict[str, Any]:
        if tuned:
            return {"autotune": True}
        cache = importlib.import_module("unsloth.kernels.moe.autotune_cache")
        model = o.case.model
        configs = cache.get_or_autotune_moe_kernels(
            model.experts, model.hidden, model.intermediate, model.topk, o.out.dtype
        )
        config = configs[("forward", "dX", "dW").index(o.case.product)]
        fields = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages")
        return {field: getattr(config, field) for field in fields}

    def make(o: Operands) -> Contender:
        r, topk = o.routing, o.case.model.topk
        more: dict[str, Any] = {"permute_x": o.case.first, "permute_y": not o.case.first} | config_of(o)
        if o.router_weights is not None:
            more |= {"topk_weights": o.router_weights, "fuse_mul_post": True}
        routing = {"m_sizes": r.m_sizes, "gather_indices": r.gather_indices, "topk": topk}
        run: Callable[[], Tensor]
        if o.case.product == "forward":
            run = partial(module.grouped_gemm_forward, X=o.X, W=o.W, **routing, **more)
        elif o.case.product == "dX":
            run = partial(module.grouped_gemm_dX, dY=o.dY, W=o.W, **routing, **more)
        else:
            run = partial(module.grouped_gemm_dW, X=o.X, dY=o.dY, **routing, **more)
        return _contender(o, run)

    return Peer(("fwd1", "dx1", "dw1", "fwd2", "dx2", "dw2"), make)


def _scattermoe(module: Any, tuned: bool) -> Peer:
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
        w = o.weights_as_factor()
        k = topk if o.case.op == "fwd1" else 1

        def run() -> Tensor:
            y: Tensor = module.parallel_linear(o.X, w, k, **known)
            return y if o.row_weights is None else y * o.row_weights

        return _contender(o, run)

    return Peer(FORWARD, make)


def _triton_kernels(module: Any, tuned: bool) -> Peer:
    """matmul on ragged rows: it gathers and scatters rows and multiplies by the router's weights itself."""
    tensor_module = importlib.import_module("triton_kernels.tensor")

    def make(o: Operands) -> Contender:
        r = o.routing
        rows = o.X if o.case.product == "forward" else o.dY
        w = o.weights_as_factor()
        known: dict[str, Any] = {"a_ragged_metadata": tensor_module.make_ragged_tensor_metadata(r.m_sizes, o.case.rows)}
        if not o.case.scatters:
            known["gather_indx"] = r.token_of_row.int() if o.case.op == "fwd1" else r.gather_indices
        else:
            known["scatter_indx"] = r.gather_indices
        if o.router_weights is not None:
            known["gammas"] = o.router_weights[r.gather]
        return _contender(o, lambda: module.matmul(rows, w, None, **known))

    return Peer(("fwd1", "fwd2", "dx1", "dx2"), make)


def _matmul_ogs(module: Any, tuned: bool) -> Peer:
    """The same library before it was renamed, with its own routing types."""
    routing_module = importlib.import_module("triton_kernels.routing")

    def make(o: Operands) -> Contender:
        r, model = o.routing, o.case.model
        data = routing_module.RoutingData(
            None,
            r.m_sizes,
            model.experts,
            model.topk,
            routing_module.compute_expt_data(r.m_sizes, model.experts, o.case.rows),
        )
        gather = routing_module.GatherIndx(r.gather_indices, r.inverse.int())
        return _contender(o, lambda: module.matmul_ogs(o.X, o.W.transpose(1, 2), None, data, gather_indx=gather))

    # Its scatter also sums over the slots of a token: only the first product is the same operation.
    return Peer(("fwd1",), make)


def _deep_gemm(module: Any, tuned: bool) -> Peer:
    """Contiguous grouped layout: rows are copied to segments that begin at multiples of its alignment, and back."""
    alignment = getattr(module, "get_mk_alignment_for_contiguous_layout", lambda: PADDED_ROWS)()

    def make(o: Operands) -> Contender:
        assert o.W is not None
        r, device = o.routing, o.out.device
        padded_sizes = [-(-size // alignment) * alignment for size in r.sizes]
        padded_rows = sum(padded_sizes)
        layout = torch.full((padded_rows,), -1, dtype=torch.int32, device=device)
        place = torch.empty(o.case.rows, dtype=torch.int64, device=device)
        target = 0
        for (expert, begin, end), padded in zip(r.segments(), padded_sizes, strict=True):
            layout[target : target + end - begin] = expert
            place[begin:end] = torch.arange(target, target + end - begin, device=device)
            target += padded
        forward = o.case.product == "forward"
        source = o.X if forward else o.dY
        in_order = torch.arange(o.case.rows, device=device)
        rows_of_padded = torch.zeros(padded_rows, dtype=torch.int64, device=device)
        rows_of_padded[place] = {"fwd1": r.token_of_row, "dx2": r.gather}.get(o.case.op, in_order)
        flat_place = place[r.inverse] if o.case.scatters else place
        gemm = module.m_grouped_bf16_gemm_nt_contiguous if forward else module.m_grouped_bf16_gemm_nn_contiguous
        out = torch.empty(padded_rows, o.out.size(1), device=device, dtype=o.out.dtype)

        def run() -> Tensor:
            gemm(source.index_select(0, rows_of_padded), o.W, out, layout)
            y = out.index_select(0, flat_place)
            return y if o.row_weights is None else y.mul_(o.row_weights)

        return _contender(o, run)

    return Peer(("fwd1", "fwd2", "dx1", "dx2"), make)


def _quack(module: Any, tuned: bool) -> Peer:
    """The grouped product under SonicMoE: gathers rows itself, scatters nothing."""

    def make(o: Operands) -> Contender:
        r = o.routing
        starts = torch.nn.functional.pad(r.ends, (1, 0)).int()
        rows = o.X if o.case.product == "forward" else o.dY
        w = o.weights_as_factor()
        gathered = {"fwd1": r.token_of_row.int(), "dx2": r.gather_indices}.get(o.case.op)
        return _contender(
            o, lambda: o.delivered(module.gemm(rows, w, cu_seqlens_m=starts, A_idx=gathered, tuned=tuned))
        )

    return Peer(("fwd1", "fwd2", "dx1", "dx2"), make)


# Name in the tables, modules that must be importable (the last one is used), adapter.
_KNOWN: tuple[tuple[str, tuple[str, ...], Callable[[Any, bool], Peer]], ...] = (
    ("unsloth", ("unsloth.kernels.moe.grouped_gemm.interface",), _unsloth),
    ("scattermoe", ("scattermoe.parallel_experts",), _scattermoe),
    ("triton_kernels", ("triton_kernels.matmul",), _triton_kernels),
    ("triton_kernels", ("triton_kernels.matmul_ogs",), _matmul_ogs),
    ("deep_gemm", ("deep_gemm",), _deep_gemm),
    ("sonicmoe", ("sonicmoe", "quack.gemm_interface"), _quack),
)


@dataclass
class Peers:
    found: dict[str, Peer]
    versions: dict[str, str]  # of those that were found
    missing: dict[str, str]  # the others, and what importing them said


def first_line(error: Exception) -> str:
    """What a library raised, in a line; a failed assert may say nothing."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def importable_peers(tuned: bool = True) -> Peers:
    """Those that are installed and load; without `tuned` they take what their heuristics say instead of tuning, which
    takes some of them minutes for each product."""
    peers = Peers({}, {}, {})
    for name, modules, adapt in _KNOWN:
        if name in peers.found:
            continue
        try:
            loaded = [importlib.import_module(module) for module in modules]
            peers.found[name] = adapt(loaded[-1], tuned)
            peers.versions[name] = _version(modules[0].partition(".")[0])
            peers.missing.pop(name, None)
        except Exception as error:  # whatever importing a foreign package raises
            peers.missing.setdefault(name, first_line(error))
    return peers


def _version(package: str) -> str:
    for name in (package, package.replace("moe", "-moe")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module(package), "__version__", "unknown version"))
