"""The entry for axolotl's table of local expert kernels: rows that came once for each rank, with ids of -1.

from axolotl.integrations.expert_parallel import experts_fn
moegemm.integrations.axolotl.register(experts_fn._LOCAL_KERNELS)
"""

from typing import Any

from torch import Tensor

from moegemm.integrations.expert_modules.experts import run_experts, stored_in
from moegemm.integrations.expert_modules.gates import activation_of

NAME = "moegemm"


def local_kernel(module: Any, rows: Tensor, expert_ids: Tensor, row_weights: Tensor) -> Tensor:
    """rows [U, H], expert_ids [U, topk] of this rank with -1 for others', row_weights [U, topk] -> [U, H]: each row is
    the weighted sum of its experts here, which the exchange of the way back adds up."""
    stored, gated = stored_in(module), getattr(module, "has_gate", True)
    out = run_experts(
        type(module).__name__, rows.to(stored.first.dtype), stored, expert_ids, row_weights,
        activation_of(module, gated), module._apply_gate if gated else module.act_fn, split=True,
    )  # fmt: skip
    return out.to(rows.dtype)


def register(table: dict[str, Any]) -> None:
    """Puts it into axolotl's `_LOCAL_KERNELS`."""
    table[NAME] = local_kernel
