"""Expert weights that bitsandbytes keeps in four bits: `replace_parameter_4bit` of a module's [E, N, K] parameter.

The module's attribute is then a parametrization, which dequantises the whole stack whenever it is asked for. The packed
values below it and their quant_state are read instead, as nf4.
"""

from typing import Any

from torch import Tensor

from moegemm.operators.packed import Packed
from moegemm.quantized.weight import NF4_BLOCKS, expand_absmax


def in_four_bits(module: Any, name: str) -> tuple[Tensor, Any] | None:
    """The packed values and their quant_state; None where the weight is anything else."""
    found = getattr(module, "parametrizations", {})
    if name not in found or len(found[name]) != 1 or type(found[name][0]).__name__ != "Bnb4bitParametrization":
        return None
    return found[name].original, found[name][0].quant_state


def why_dequantised(module: Any, name: str) -> str | None:
    """Why a weight in four bits is dequantised for every call; None if it is read packed, or is not in four bits."""
    found = in_four_bits(module, name)
    if found is None:
        return None
    state = found[1]
    if state.quant_type != "nf4":
        return f"{name} is bitsandbytes' {state.quant_type}, and nf4 is read packed"
    if len(state.shape) != 3 or getattr(module, "is_transposed", False):
        return f"{name} is {list(state.shape)} with K before N, and nf4 is read packed as [E, N, K]"
    if state.blocksize not in NF4_BLOCKS or state.shape[1] * state.shape[2] % state.blocksize:
        return f"{name} is {list(state.shape)}, so that blocks of {state.blocksize} go on from one expert to the next"
    return None


def packed_nf4(values: Tensor, state: Any) -> Packed:
    """As moegemm reads it. Nested absmax is expanded for each call: kept in fp32, it would cost what nesting saves."""
    experts, n, k = state.shape
    absmax = state.absmax.to(values.device).view(experts, -1)
    if state.nested:
        second = state.state2
        absmax = expand_absmax(
            absmax, second.absmax.to(values.device), second.code.to(values.device), state.offset.to(values.device),
            second.blocksize, True,
        )  # fmt: skip
    if k % 2:
        return Packed(values.view(experts, -1), absmax, f"nf4/{state.blocksize}/{n}x{k}", state.dtype)
    return Packed(values.view(experts, n, k // 2), absmax, f"nf4/{state.blocksize}", state.dtype)
