"""Scales of quantised weights in check mode: one that is no finite number is refused, with its place.

check=True and MOEGEMM_CHECK=1 ask for it, as for the checks of routing data. It waits for the device. Traced code and
tensors without memory are not checked.
"""

import os
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from moegemm.operators.packed import Packed
from moegemm.quantized.weight import weight_of

_E8M0_NAN = 255


def check_scales(name: str, w: Packed, asked: bool) -> None:
    """ValueError with the first scale that is NaN or infinite, if it is asked for here or by the environment."""
    if torch.compiler.is_compiling() or not (asked or os.environ.get("MOEGEMM_CHECK") == "1"):
        return
    scales = w.scales
    if scales.is_meta or isinstance(scales, FakeTensor):
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
