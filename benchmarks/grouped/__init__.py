"""The parts of benchmarks/grouped_gemm.py: what is measured, how, and how it is written down."""
