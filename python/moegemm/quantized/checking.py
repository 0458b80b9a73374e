"""Scales of quantised weights in check mode: one that is no finite number is refused, with its place.

check=True and MOEGEMM_CHECK=1 ask for it, as for the checks of routing data.
"""

from typing import Any

import torch

from moegemm.operators.packed import Packed
from moegemm.operators.rules import reads_values
from moegemm.quantized.weight import weight_of

_E8M0_NAN = 255


def check_scales(name: str, w: Packed, asked: bool) -> None:
    """ValueError with the first scale that is NaN or infinite, if it is asked for here or by the environment."""
    scales = w.scales
    if not reads_values(scales, asked):
        return
    bad = scales == _E8M0_NAN if scales.dtype == torch.uint8 else ~torch.isfinite(scales)
    if not bool(bad.any()):
        return
    place = bad.nonzero()[0].tolist()
    value = scales[tuple(place)].item()
    shown = "255, the NaN of e8m0" if scales.dtype == torch.uint8 else value
    raise ValueError(
        f"scales{place} of {name}, of expert {place[0]}, is {shown}; scales of {w.word} must be finite numbers"
    )


def checked_weight(name: str, w: Any, asked: bool = False) -> Any:
    """weight_of, and in check mode with its scales looked at."""
    w = weight_of(name, w)
    if isinstance(w, Packed):
        check_scales(name, w, asked)
    return w
