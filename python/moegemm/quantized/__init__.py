"""Frozen expert weights in the formats of published checkpoints, dequantised inside the products."""

from moegemm.quantized.rounding import quantize
from moegemm.quantized.weight import QuantizedWeight

__all__ = ["QuantizedWeight", "quantize"]
