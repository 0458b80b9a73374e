"""Kernels asked for by hand: the config objects of the Unsloth-compatible interface.

Kernels are compiled ahead of time. A config runs exactly the kernel it describes when there is one, else the
nearest one, with one warning that names both. `num_warps` and `flatten` describe a code generator that is not
used here: they are accepted and kept. A `use_tma_*` of False leaves the choice to the kernel, and so does None for a
block size, warps or stages.
"""

import operator
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from moegemm.operators.errors import explain, shown
from moegemm.operators.loading import ops
from moegemm.operators.rules import is_integer

DEFAULT_BLOCK = 32
DEFAULT_WARPS = 4
DEFAULT_STAGES = 2


@dataclass
class KernelConfig:
    """What the three products' configs share."""

    # The tile along the result's rows and columns and along the contraction, then TMA for the operand with one row per
    # routed row (X or dY) and for the other one.
    _NUMBERS: ClassVar[tuple[str, str, str, str, str]]
    _OP: ClassVar[str]

    BLOCK_SIZE_M: int | None = DEFAULT_BLOCK
    BLOCK_SIZE_N: int | None = DEFAULT_BLOCK
    BLOCK_SIZE_K: int | None = DEFAULT_BLOCK
    num_warps: int | None = DEFAULT_WARPS
    num_stages: int | None = DEFAULT_STAGES
    flatten: bool = True
    permute_x: bool = False
    permute_y: bool = False
    fuse_mul_post: bool = False
    use_tma_store: bool = False

    def __post_init__(self) -> None:
        if self.untouched():
            return
        for field in fields(self):
            value = getattr(self, field.name)
            name = f"{type(self).__name__}.{field.name}"
            if field.type is bool:
                if not isinstance(value, bool):
                    raise TypeError(f"{name} is {shown(value)}; True or False is accepted")
            elif value is None:
                continue
            elif not is_integer(value):
                raise TypeError(f"{name} is {shown(value)}; an int is accepted, or None for any")
            elif not 1 <= value <= 65536:
                raise ValueError(f"{name} is {value}; it must be between 1 and 65536")

    def untouched(self) -> bool:
        """Whether every field is its default. Asked first, since the checks take 4 us of a raw call."""
        if torch.compiler.is_compiling():  # Dynamo of torch 2.11 traces no vars()
            return False
        defaults = _DEFAULTS.get(type(self))
        return defaults is not None and all(map(operator.is_, vars(self).values(), defaults))

    def tma_flags(self) -> dict[str, bool]:
        """The use_tma_* fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("use_tma")}

    def to_string(self, include_tuning_params: bool = False, include_tma: bool = False) -> str:
        """The flags that are on, as a label for a table or a test.

        >>> KernelConfigForward(permute_x=True, use_tma_load_w=True).to_string(include_tma=True)
        'permute_x,use_tma_load_w'
        """
        shown = [name for name in ("permute_x", "permute_y") if getattr(self, name)]
        if include_tuning_params:
            names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages", "flatten")
            shown += [f"{name}={getattr(self, name)}" for name in names]
        if include_tma:
            shown += [name for name, on in self.tma_flags().items() if on]
        return ",".join(shown)

    def all_defaults(self) -> bool:
        """True if nothing asks for a particular kernel."""
        tile = (self.BLOCK_SIZE_M, self.BLOCK_SIZE_N, self.BLOCK_SIZE_K, self.num_stages)
        defaults = (DEFAULT_BLOCK, DEFAULT_BLOCK, DEFAULT_BLOCK, DEFAULT_STAGES)
        any_tile = all(number in (None, default) for number, default in zip(tile, defaults, strict=True))
        return any_tile and not any(self.tma_flags().values())

    def numbers(self, argument: str, options: str) -> list[int] | None:
        """The operators' `config` argument: rows, columns, depth and stages, 0 for any, then 1 for each TMA that is
        asked for. None where nothing is, so that the planner chooses, or autotune. Refuses a config that the hardware
        cannot run, and fields that were set since to what is none."""
        if self.untouched():
            return None
        if not torch.compiler.is_compiling():
            self.__post_init__()
        if self.all_defaults():
            return None
        rows, columns, depth, tma_rows, tma_others = (getattr(self, name) for name in self._NUMBERS)
        asked = (rows, columns, depth, self.num_stages, tma_rows, tma_others, self.use_tma_store)
        numbers = [int(number or 0) for number in asked]
        if any(self.tma_flags().values()):
            try:
                ops.check_config.default(argument, self._OP, options, numbers)
            except RuntimeError as error:
                raise explain(error, {}) from None
        return numbers if any(numbers) else None


@dataclass
class KernelConfigForward(KernelConfig):
    """A kernel for Y = X W^T.

    BLOCK_SIZE_M, _N and _K are the extents of its tile along M, N and K, num_stages how deep its loads run ahead; ints
    from 1 to 65536, or None for any. All at their defaults leave the kernel to the planner. A use_tma_* of True asks
    for loads or stores by TMA. permute_x, permute_y, fuse_mul_post, num_warps and flatten are kept and mean nothing
    here: one config may serve both products of a layer.

    >>> KernelConfigForward(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64).num_stages
    2
    """

    use_tma_load_w: bool = False
    use_tma_load_x: bool = False
    _NUMBERS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "use_tma_load_x", "use_tma_load_w")
    _OP = "forward"


@dataclass
class KernelConfigBackward_dX(KernelConfig):  # noqa: N801 - Unsloth's name
    """A kernel for dX = dY W; its fields are those of KernelConfigForward.

    >>> KernelConfigBackward_dX(use_tma_load_w=True).use_tma_load_dy
    False
    """

    use_tma_load_dy: bool = False
    use_tma_load_w: bool = False
    _NUMBERS = ("BLOCK_SIZE_M", "BLOCK_SIZE_K", "BLOCK_SIZE_N", "use_tma_load_dy", "use_tma_load_w")
    _OP = "dx"


@dataclass
class KernelConfigBackward_dW(KernelConfig):  # noqa: N801 - Unsloth's name
    """A kernel for dW = dY^T X; its fields are those of KernelConfigForward.

    >>> KernelConfigBackward_dW(BLOCK_SIZE_M=128).BLOCK_SIZE_M
    128
    """

    use_tma_load_dy: bool = False
    use_tma_load_x: bool = False
    _NUMBERS = ("BLOCK_SIZE_N", "BLOCK_SIZE_K", "BLOCK_SIZE_M", "use_tma_load_x", "use_tma_load_dy")
    _OP = "dw"


_DEFAULTS: dict[type, tuple[object, ...]] = {
    config: tuple(field.default for field in fields(config))
    for config in (KernelConfigForward, KernelConfigBackward_dX, KernelConfigBackward_dW)
}
