"""route and combine: bound by launches and by memory, so measured against those."""

from collections.abc import Sequence
from typing import Any

import torch

import moegemm
from moegemm.bench.cases import Case, Model
from moegemm.bench.operands import Routing, draw_experts, randn
from moegemm.bench.timing import Clock, spread

ROUTE_TOPK, ROUTE_EXPERTS = 8, 128
ROUTES_PER_GRAPH = 20


def measure_route(clock: Clock, device: str, rounds: int, tokens: int) -> dict[str, Any]:
    case = Case(Model("route", ROUTE_EXPERTS, ROUTE_TOPK, 0, 0), tokens, "random", "fwd1")
    expected = Routing.of(draw_experts(case, device, seed=1), ROUTE_EXPERTS)
    ids = expected.expert_ids.int()
    m_sizes, gather_indices = moegemm.route(ids, ROUTE_EXPERTS)
    correct = torch.equal(m_sizes, expected.m_sizes) and torch.equal(gather_indices, expected.gather_indices)
    times = clock.repeated(lambda: moegemm.route(ids, ROUTE_EXPERTS), ROUTES_PER_GRAPH, rounds)
    return {
        "tokens": tokens,
        "topk": ROUTE_TOPK,
        "experts": ROUTE_EXPERTS,
        "correct": correct,
        **spread(times),
    }


def measure_combine(
    clock: Clock, models: Sequence[Model], device: str, dtype: torch.dtype, rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """The top-k sum, weighted (forward) and plain (dX), beside a copy that moves as many bytes."""
    measured = []
    for model in models:
        rows = randn(tokens * model.topk, model.hidden, device=device, dtype=dtype)
        weights = torch.rand(tokens, model.topk, device=device)
        out_elems = tokens * model.hidden
        moved_bytes = (rows.numel() + out_elems) * rows.element_size()
        source = randn((rows.numel() + out_elems) // 2, device=device, dtype=dtype)
        target = torch.empty_like(source)
        calls: dict[str, Any] = {
            "copy": lambda source=source, target=target: target.copy_(source),
            "weighted": lambda rows=rows, weights=weights: moegemm.combine(rows, weights),
            "plain": lambda rows=rows, topk=model.topk: moegemm.combine(rows, None, topk),
        }
        few = min(tokens, 64)
        grouped = rows.view(tokens, model.topk, model.hidden)[:few].double()
        expected = {"weighted": (grouped * weights[:few, :, None]).sum(1), "plain": grouped.sum(1)}
        limit = torch.finfo(dtype).eps / 2
        errors = {n: float((calls[n]()[:few].double() - e).norm() / e.norm()) for n, e in expected.items()}
        times = clock.round_robin(calls, rounds)
        measured.append(
            {
                "model": model.name,
                "tokens": tokens,
                "topk": model.topk,
                "columns": model.hidden,
                "bytes": moved_bytes,
                "contenders": {
                    name: spread(times[name]) | ({"correct": errors[name] <= limit} if name in errors else {})
                    for name in calls
                },
            }
        )
    return measured
