"""Which kernel runs: asked for by hand (configs), measured in a call (autotune) or ahead of time (measure)."""

from moegemm.tuning.configs import (
    DEFAULT_BLOCK,
    DEFAULT_STAGES,
    DEFAULT_WARPS,
    KernelConfig,
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
)

__all__ = [
    "DEFAULT_BLOCK",
    "DEFAULT_STAGES",
    "DEFAULT_WARPS",
    "KernelConfig",
    "KernelConfigBackward_dW",
    "KernelConfigBackward_dX",
    "KernelConfigForward",
]
