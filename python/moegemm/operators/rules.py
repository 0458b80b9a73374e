"""Rules of the Unsloth-compatible arguments that no operator sees. All others are the library's (moegemm/describe.h);
what tensors without memory, which never reach it, can get wrong is refused here, in its words."""

from torch import Tensor


def require_same_dtype(name: str, tensor: Tensor, lead_name: str, lead: Tensor) -> None:
    if tensor.dtype != lead.dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must have {lead.dtype}, the dtype of {lead_name}")


def require_same_device(name: str, tensor: Tensor | None, lead_name: str, lead: Tensor) -> None:
    if tensor is not None and tensor.device != lead.device:
        raise TypeError(f"{name} is on {tensor.device}; it must be on {lead.device}, where {lead_name} is")


def require_halves(name: str, activation: str) -> None:
    if "/concatenated" not in activation:
        raise ValueError(
            f"{name} is given with activation {activation}; gates and ups in two tensors are those of a gated "
            "activation, concatenated"
        )


def require_weight_of_each_slot(router_weights: Tensor | None, expert_ids: Tensor) -> None:
    if router_weights is not None and router_weights.shape != expert_ids.shape:
        raise ValueError(
            f"router_weights is {list(router_weights.shape)}; its shape must be that of expert_ids, "
            f"{list(expert_ids.shape)}"
        )


def require_valid_role(permute_x: bool, permute_y: bool, is_first_gemm: bool, dX_only: bool, dW_only: bool) -> None:
    """Which GEMM of the layer it is, and which gradients are wanted."""
    if permute_x and not is_first_gemm:
        raise ValueError("permute_x=True with is_first_gemm=False; only the first GEMM of a layer gathers X")
    if permute_y and is_first_gemm and not permute_x:
        raise ValueError("permute_y=True with is_first_gemm=True; only the second GEMM of a layer scatters Y")
    if dX_only and dW_only:
        raise ValueError("dX_only=True and dW_only=True; at most one of them is accepted")


def require_no_fuse_mul_pre(fuse_mul_pre: bool) -> None:
    if fuse_mul_pre:
        raise NotImplementedError("fuse_mul_pre=True; only False is accepted (fuse_mul_post multiplies after the GEMM)")
