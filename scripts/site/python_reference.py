"""The reference of the Python package: which names stand in which section. mkdocstrings fills in their docstrings."""

SECTIONS = {
    "The layer": ("moe_mlp", "experts_mlp", "lora_moe_mlp", "LoraAdapter", "LowRank", "WeightGradients"),
    "Models": ("patch", "unpatch", "report"),
    "Routing": ("route", "combine"),
    "Products": ("grouped_gemm", "GroupedGemm", "grouped_gemm_forward", "grouped_gemm_dX", "grouped_gemm_dW"),
    "Kernel configs": ("KernelConfigForward", "KernelConfigBackward_dX", "KernelConfigBackward_dW"),
    "Plans and tuning": ("plan", "tune", "tuning_cache"),
    "This installation": ("info", "load_kernels"),
}


def to_markdown() -> str:
    lines = ["# Python API", "", "Everything here is imported from `moegemm`."]
    for title, names in SECTIONS.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"::: moegemm.{name}"]
    return "\n".join(lines) + "\n"
