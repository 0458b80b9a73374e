"""Low-rank adapters on experts: y_r = x_r W_e^T + scaling * (x_r A_e^T) B_e^T. W and its adapter are never added."""

from moegemm.lora.adapter import LoraAdapter
from moegemm.lora.kept import keep_factors
from moegemm.lora.layer import lora_moe_mlp
from moegemm.lora.low_rank import LowRank

__all__ = ["LoraAdapter", "LowRank", "keep_factors", "lora_moe_mlp"]
