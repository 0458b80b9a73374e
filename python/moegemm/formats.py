"""The number formats that tensors of values may have; include/moegemm/kinds.h is the library's own table."""

from typing import Final, NamedTuple

import torch


class Format(NamedTuple):
    name: str
    # Of a layer beside the same in plain torch: sums in another order and fewer roundings.
    tolerance: float


FORMATS: Final = {
    torch.bfloat16: Format("bf16", 2e-2),
    torch.float16: Format("fp16", 5e-3),
    torch.float32: Format("fp32", 1e-4),
}
NAMES: Final = ", ".join(known.name for known in FORMATS.values())
