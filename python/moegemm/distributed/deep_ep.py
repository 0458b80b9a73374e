"""DeepEP's compact layout: a token once for each rank, with its experts there and their weights.

Written against the interfaces of DeepEP 1 (`Buffer`) and 2 (`ElasticBuffer`), which take several GPUs with NVLink: the
tests run on emulations of both.
"""

from typing import Any

import torch
from torch import Tensor

from moegemm.distributed.dispatcher import Dispatched


class _Dispatch(torch.autograd.Function):
    """The way there. Its gradient is the way back: `combine` sums the rows of a token, and its weights' gradients."""

    @staticmethod
    def forward(ctx: Any, transport: Any, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
        rows, row_ids, row_weights, num_tokens, handle = transport.there(x, ids, weights)
        ctx.transport, ctx.handle, ctx.dtype = transport, handle, weights.dtype
        ctx.mark_non_differentiable(row_ids, *([] if num_tokens is None else [num_tokens]))
        ctx.set_materialize_grads(False)
        transport.handle = handle
        return rows, row_ids, row_weights, num_tokens

    @staticmethod
    def backward(ctx: Any, d_rows: Any, _: None, d_weights: Any, __: None) -> tuple[Any, ...]:
        d_x, d_home = ctx.transport.back(d_rows.contiguous(), ctx.handle, d_weights)
        return None, d_x, None, None if d_home is None else d_home.to(ctx.dtype)


class _Combine(torch.autograd.Function):
    """The way back, whose gradient goes the way there by the same handle."""

    @staticmethod
    def forward(ctx: Any, transport: Any, handle: Any, rows: Tensor) -> Tensor:
        ctx.transport, ctx.handle = transport, handle
        out: Tensor = transport.back(rows.contiguous(), handle, None)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.transport.again(gradients[0].contiguous(), ctx.handle)


class DeepEP:
    """A Dispatcher over a `deep_ep.Buffer` or `deep_ep.ElasticBuffer` that you have made.

    synchronise=False asks an ElasticBuffer not to wait for sizes: rows are a capacity, and how many are real is known
    to the device alone. Rows past that are garbage which nothing reads. A Buffer always waits.
    """

    def __init__(self, buffer: Any, num_experts: int, *, synchronise: bool = True) -> None:
        self.buffer, self.num_experts, self.synchronise = buffer, num_experts, synchronise
        self.ranks = int(buffer.group_size if hasattr(buffer, "group_size") else buffer.num_ranks)
        if num_experts % self.ranks:
            raise ValueError(f"num_experts is {num_experts}; it must be a multiple of the {self.ranks} ranks")
        self.experts_here = num_experts // self.ranks
        self.elastic = not hasattr(buffer, "get_dispatch_layout")
        if not self.elastic and not synchronise:
            raise ValueError("synchronise is False; deep_ep.Buffer waits for sizes, ElasticBuffer need not")
        self.handle: Any = None

    def there(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """Rows, their ids and weights, how many of them are real (None: all), and DeepEP's handle."""
        weights = weights.float()
        if self.elastic:
            rows, row_ids, row_weights, handle, *_ = self.buffer.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_experts=self.num_experts, do_expand=False,
                do_cpu_sync=self.synchronise,
            )  # fmt: skip
            ends = handle.psum_num_recv_tokens_per_scaleup_rank
            return rows, row_ids, row_weights, None if self.synchronise else ends[-1:].clone(), handle
        to_rank, to_node, to_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, self.num_experts)
        rows, row_ids, row_weights, _, handle, _ = self.buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=to_rank, num_tokens_per_rdma_rank=to_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=to_expert,
        )  # fmt: skip
        return rows, row_ids, row_weights, None, handle

    def again(self, x: Tensor, handle: Any) -> Tensor:
        """Other rows, the way that those of an earlier call went."""
        rows: Tensor = self.buffer.dispatch(x, handle=handle)[0]
        return rows

    def back(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The sum of each token's rows, and of their weights where given."""
        out, home, *_ = self.buffer.combine(rows, handle=handle, topk_weights=weights)
        return out, home

    def dispatch(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor | None) -> Dispatched:
        """See Dispatcher. Weights travel: each rank multiplies by those of its experts."""
        if router_weights is None:
            router_weights = x.new_ones(expert_ids.shape, dtype=torch.float32)
        rows, ids, weights, num_tokens = _Dispatch.apply(  # type: ignore[no-untyped-call]
            self, x, expert_ids, router_weights
        )
        # A token may name one expert several times: each of its slots can be a row here.
        return Dispatched(rows, ids, weights, num_tokens=num_tokens, max_rows=ids.numel(), state=self.handle)

    def combine(self, rows: Tensor, dispatched: Dispatched) -> Tensor:
        """See Dispatcher."""
        if dispatched.state is None:
            raise ValueError("dispatched was combined already; one combine per dispatch")
        handle, dispatched.state = dispatched.state, None
        out: Tensor = _Combine.apply(self, handle, rows)  # type: ignore[no-untyped-call]
        return out
