"""The entry for axolotl's table of local expert kernels: rows that came once for each rank, with ids of -1.

from axolotl.integrations.expert_parallel import experts_fn
moegemm.integrations.axolotl.register(experts_fn._LOCAL_KERNELS)
"""

from typing import Any

from torch import Tensor

from moegemm.integrations.expert_modules.experts import run_stored, stored_in, why_not
from moegemm.integrations.expert_modules.packed_experts import require_packed_experts

NAME = "moegemm"


def local_kernel(module: Any, rows: Tensor, expert_ids: Tensor, row_weights: Tensor) -> Tensor:
    """rows [U, H], expert_ids [U, topk] of this rank with -1 for others', row_weights [U, topk] -> [U, H]: each row is
    the weighted sum of its experts here, which the exchange of the way back adds up."""
    require_packed_experts(module)
    stored = stored_in(module)
    reason = why_not(stored)
    if reason is not None:
        raise ValueError(f"{type(module).__name__} cannot run on moegemm: {reason}")
    return run_stored(module, stored, rows, expert_ids, row_weights, split=True)


def register(table: dict[str, Any]) -> None:
    """Puts it into axolotl's `_LOCAL_KERNELS`."""
    table[NAME] = local_kernel
