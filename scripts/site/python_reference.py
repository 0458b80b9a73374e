"""The reference of the Python package: which names stand in which section. mkdocstrings fills in their docstrings."""

SECTIONS = {
    "The layer": (
        "moe_mlp",
        "experts_mlp",
        "lora_moe_mlp",
        "LoraAdapter",
        "LowRank",
        "keep_factors",
        "WeightGradients",
    ),
    "Quantised weights": ("QuantizedWeight", "quantize", "quantize_experts"),
    "Models": ("patch", "unpatch", "report", "integrations.reporting.Report"),
    "Routing": ("route", "combine"),
    "Experts on many ranks": tuple(
        f"distributed.{name}"
        for name in (
            "expert_parallel_mlp",
            "AllToAll",
            "DeepEP",
            "Dispatcher",
            "Dispatched",
            "shard_experts",
            "checkpoint_ops",
            "clip_grad_norm_",
        )
    ),
    "Products": ("grouped_gemm", "GroupedGemm", "grouped_gemm_forward", "grouped_gemm_dX", "grouped_gemm_dW"),
    "Kernel configs": ("KernelConfigForward", "KernelConfigBackward_dX", "KernelConfigBackward_dW"),
    "Plans and tuning": (
        "plan",
        "program.plans.LayerPlan",
        "tune",
        "tuning.reports.TuneReports",
        "tuning_cache",
        "bench.notebook.read_record",
    ),
    "This installation": (
        "info",
        "load_kernels",
        "batch_invariant",
        "set_batch_invariant",
        "max_multiprocessors",
        "set_max_multiprocessors",
    ),
}


def to_markdown() -> str:
    lines = ["# Python API", "", "Everything here is imported from `moegemm`, or from the module that its name has."]
    for title, names in SECTIONS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"::: moegemm.{name}"]
    return "\n".join(lines) + "\n"
