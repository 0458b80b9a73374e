"""Where the operators are in torch.ops. A kernel of the Hugging Face Hub has a file of its own here, with a namespace
that no other version has (scripts/package/hub_kernel.py)."""

NAMESPACE = "moegemm"


def add_op_namespace_prefix(name: str) -> str:
    return f"{NAMESPACE}::{name}"
