"""Bits of the operators' `flags` argument; bindings/torch/gemm_rules.h has the same list."""

from typing import Final

PERMUTE_X: Final = 1
PERMUTE_Y: Final = 2
FUSE_MUL: Final = 4
ALLOW_TF32: Final = 8
CHECK: Final = 16
ACCUMULATE: Final = 32
FLOAT32_OUTPUT: Final = 64
WARN_AT_ONCE: Final = 128
DY_PER_TOKEN: Final = 256
AUTOTUNE: Final = 512
TRANSPOSED: Final = 1024
