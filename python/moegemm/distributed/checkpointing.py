"""Which operators are worth keeping when activations are computed again."""

from typing import Any

from moegemm.operators.loading import ops
from moegemm.operators.registered.products import PRODUCTS

ROUTING = ("route", "route_compact", "index_arrivals", "first_slots", "ids_at_target")


def checkpoint_ops(keep: str = "products") -> set[Any]:
    """Operators for selective activation checkpointing to save.

    keep: "products" are the matrix products and the routing, whose recomputation would cost most; "routing" is the
    latter alone, a few integers per row. Exchanges are in neither: torch's own lists have them, or not, as
    `torch.ops._c10d_functional.all_to_all_single`. What is computed again has the same bits. Products that write into
    memory which is there are: those of out=, and of gates and ups apart that are transposed or quantised.

    >>> import moegemm.distributed
    >>> sorted(str(op) for op in moegemm.distributed.checkpoint_ops("routing"))[-2:]
    ['moegemm.route.default', 'moegemm.route_compact.default']
    """
    if keep not in ("products", "routing"):
        raise ValueError(f'keep is {keep!r}; "products" and "routing" are accepted')
    products = () if keep == "routing" else (name for name, product in PRODUCTS.items() if product.kept)
    return {getattr(ops, name).default for name in (*ROUTING, *products)}
