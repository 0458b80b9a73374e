"""The shape of a quantised W, from its packed tensor and the text of its format."""

from torch import Tensor

# Values in an element of the packed tensor.
_VALUES = {"mxfp4": 2, "fp8": 1, "int4": 8, "nf4": 2}


def packed_shape(w: Tensor, scales: Tensor | None, w_format: str) -> tuple[int, int, int]:
    """E, N and K."""
    name, *rest = w_format.split("/")
    if name not in _VALUES:
        raise ValueError(f"w_format is '{w_format}'; accepted begin with {', '.join(_VALUES)}")
    if scales is None:
        raise ValueError(f"w_scales is None; w_format '{w_format}' needs it")
    if w.dim() == 2 and len(rest) == 2:  # flat nf4 with its shape
        n, k = map(int, rest[1].split("x"))
        return w.size(0), n, k
    if w.dim() != 3:
        raise ValueError(f"W has {w.dim()} dimensions; a packed W has three: [E, N, packed K]")
    return w.size(0), w.size(1), w.size(2) * _VALUES[name]
