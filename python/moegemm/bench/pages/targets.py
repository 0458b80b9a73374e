"""What is to be reached on one H200 with bf16."""

from typing import NamedTuple


class Target(NamedTuple):
    of_dense: float  # share of one dense product with the same FLOPs
    of_torch: float = 1.0  # times torch's grouped_mm with copies


# 8192 tokens, random routing.
AT_8192 = {
    "qwen3-30b-a3b": {
        "fwd1": Target(0.85, 1.33),
        "fwd2": Target(0.94, 1.8),
        "dx1": Target(0.92, 1.42),
        "dx2": Target(0.82, 1.5),
        "dw1": Target(0.80, 1.38),
        "dw2": Target(0.75, 1.4),
    },
    "mixtral-8x7b": {
        "fwd1": Target(1.0, 1.1),
        "fwd2": Target(0.97),
        "dx1": Target(0.94),
        "dx2": Target(0.92),
        "dw1": Target(0.93, 1.1),
        "dw2": Target(0.90),
    },
    "llama4-scout": {
        "fwd1": Target(0.95),
        "fwd2": Target(0.95),
        "dx1": Target(0.92),
        "dx2": Target(0.90),
        "dw1": Target(0.90),
        "dw2": Target(0.88),
    },
    "gpt-oss-120b": {
        "fwd1": Target(0.88, 1.5),
        "fwd2": Target(0.85, 1.5),
        "dx1": Target(0.75, 1.25),
        "dx2": Target(0.72),
        "dw1": Target(0.70, 1.25),
        "dw2": Target(0.68),
    },
    "qwen3-next-80b-a3b": {
        "fwd1": Target(0.76, 1.65),
        "fwd2": Target(0.68, 1.8),
        "dx1": Target(0.70, 1.5),
        "dx2": Target(0.66),
        "dw1": Target(0.56, 1.7),
        "dw2": Target(0.52),
    },
    "deepseek-v3": {
        "fwd1": Target(0.82, 1.25),
        "fwd2": Target(0.82),
        "dx1": Target(0.80),
        "dx2": Target(0.78),
        "dw1": Target(0.75),
        "dw2": Target(0.75),
    },
}

# Decoding, as multiples of the time that reading the touched experts' weights once takes at this rate.
READ_BYTES_PER_S = 4.3e12
DECODE = {"fwd1": 1.08, "fwd2": 1.15}

# The sm80 backend on the same chip, in TFLOP/s: it must be good on other GPUs, here it is the last resort.
MMA_SYNC_TFLOPS = 645.0  # mma.sync m16n8k16 bf16 from registers alone, measured
SM80_AT_8192 = {
    "qwen3-30b-a3b": {"fwd": 350.0, "dx": 350.0, "dw": 310.0},
    "mixtral-8x7b": {"fwd": 400.0, "dx": 400.0, "dw": 360.0},
}
SM80_DECODE = 1.25

ROUTE_US = 25.0  # 8192 tokens x 8 over 128 experts
COMBINE_OF_COPY = 0.90
