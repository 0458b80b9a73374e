"""moegemm.QuantizedWeight: a stack of frozen experts in the bytes of a checkpoint."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moegemm.formats import FORMATS
from moegemm.operators.errors import explain, shown
from moegemm.operators.loading import ops
from moegemm.operators.packed import REFUSED_GRADIENT, Packed, format_of
from moegemm.operators.rules import is_integer, require_dtype, require_tensor
from moegemm.sharded import PLAIN_TENSORS, local_weight, mesh_of_experts

_dequantize: Callable[..., Tensor] = ops.dequantize.default

MX_GROUP = 32
FP8_BLOCK = (128, 128)
INT4_GROUPS = (32, 64, 128)
NF4_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FLOAT_SCALES = (torch.float32, torch.bfloat16, torch.float16)
FP8_SCALES = (*FLOAT_SCALES, torch.float8_e8m0fnu)
INT4_SCALES = (torch.bfloat16, torch.float16)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_tensors(**given: object) -> None:
    for name, value in given.items():
        require_tensor(name, value)


def _require_shape(name: str, tensor: Tensor, shape: Sequence[int], meaning: str) -> None:
    _require(
        tuple(tensor.shape) == tuple(shape),
        f"{name} is {list(tensor.shape)}; its shape must be {meaning} = {list(shape)}",
    )


def is_fp8_block(block: object) -> bool:
    return isinstance(block, tuple | list) and tuple(block) == FP8_BLOCK


def require_one_of(name: str, value: object, accepted: Sequence[int]) -> None:
    _require(value in accepted, f"{name} is {shown(value)}; accepted are {', '.join(map(str, accepted))}")


def e8m0_as_bytes(scales: Tensor) -> Tensor:
    """As the operators take scales that are powers of two; others as they are."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


class QuantizedWeight(nn.Module):
    """Frozen expert weights [E, N, K] in a quantised format, accepted wherever moegemm takes W.

    Made by from_mxfp4, from_fp8, from_int4 and from_nf4 of what a checkpoint holds, or by moegemm.quantize of weights
    in 16 or 32 bits. The bytes stay as they are: forward and dX read the same copy, and their results have the bits of
    the product with `dequantize(x.dtype)`.

    It is a module with two parameters that never require gradients, `values` and `scales`. As an attribute of a module
    it is a submodule: state_dict, safetensors and load_state_dict see plain tensors, `.to(device)` moves them, and a
    change of dtype (`.half()`, `.to(torch.bfloat16)`) leaves them alone. It pickles and deepcopies, may be on meta, and
    torch.compile and CUDA graphs take it.

    >>> import torch, moegemm
    >>> w = moegemm.quantize(torch.randn(4, 8, 64), "mxfp4")
    >>> w
    QuantizedWeight(mxfp4, experts=4, out=8, in=64, 1088 bytes, cpu)
    >>> x = torch.randn(6, 64, dtype=torch.bfloat16)
    >>> moegemm.grouped_gemm(x, w, m_sizes=torch.tensor([3, 0, 1, 2]), topk=1).shape
    torch.Size([6, 8])
    """

    values: nn.Parameter
    scales: nn.Parameter

    def __init__(self, values: Tensor, scales: Tensor, word: str) -> None:
        """From tensors as moegemm.operators.packed describes them; the constructors by name check what they get."""
        super().__init__()
        if values.device != scales.device:
            raise TypeError(f"scales is on {scales.device}; it must be on {values.device}, where the values are")
        self.values, self.scales, self.word = _frozen(values), _frozen(scales), word

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor) -> "QuantizedWeight":
        """MXFP4 as gpt-oss stores it: blocks uint8 [E, N, K / 32, 16] or [E, N, K / 2], the low nibble first; scales
        uint8 or float8_e8m0fnu [E, N, K / 32]."""
        _require_tensors(blocks=blocks, scales=scales)
        if blocks.dtype == torch.int8:  # DeepSeek-V4
            blocks = blocks.view(torch.uint8)
        require_dtype("blocks", blocks, (torch.uint8,))
        require_dtype("scales", scales, (torch.uint8, torch.float8_e8m0fnu))
        if blocks.dim() == 4 and blocks.size(3) == MX_GROUP // 2:
            blocks = blocks.flatten(2)
        _require(
            blocks.dim() == 3, f"blocks is {list(blocks.shape)}; its shape must be [E, N, K / 32, 16] or [E, N, K / 2]"
        )
        experts, n, half = blocks.shape
        _require(
            half % (MX_GROUP // 2) == 0 and half > 0,
            f"blocks is {list(blocks.shape)}, so that K is {2 * half}; it must be a multiple of {MX_GROUP}",
        )
        _require_shape("scales", scales, (experts, n, half * 2 // MX_GROUP), "[E, N, K / 32]")
        return cls(blocks, e8m0_as_bytes(scales), "mxfp4")

    @classmethod
    def from_fp8(cls, values: Tensor, scales: Tensor, block: tuple[int, int] | None = FP8_BLOCK) -> "QuantizedWeight":
        """e4m3 with scales to multiply by: values float8_e4m3fn [E, N, K]; scales fp32, bf16, fp16 or float8_e8m0fnu.

        With a block they are [E, ceil(N / 128), ceil(K / 128)], as `weight_scale_inv` of DeepSeek-V3 and Qwen3. With
        block=None one for each output channel, [E, N] or [E, N, 1], or one for each expert, [E], or a single one.
        """
        _require_tensors(values=values, scales=scales)
        require_dtype("values", values, (torch.float8_e4m3fn,))
        require_dtype("scales", scales, FP8_SCALES)
        _require(values.dim() == 3, f"values is {list(values.shape)}; its shape must be [E, N, K]")
        experts, n, k = values.shape
        scales = e8m0_as_bytes(scales)
        if block is not None:
            _require(is_fp8_block(block), f"block is {shown(block)}; (128, 128) and None (per channel) are accepted")
            expected = (experts, -(-n // FP8_BLOCK[0]), -(-k // FP8_BLOCK[1]))
            _require_shape("scales", scales, expected, "[E, ceil(N / 128), ceil(K / 128)]")
            return cls(values, scales, f"fp8/{FP8_BLOCK[0]}x{FP8_BLOCK[1]}")
        if scales.numel() == 1:
            return cls(values, scales.reshape(1).expand(experts), "fp8/tensor")
        if scales.dim() == 1 and scales.size(0) == experts:
            return cls(values, scales, "fp8/tensor")
        if tuple(scales.shape) in ((experts, 1), (experts, 1, 1)):
            return cls(values, scales.reshape(experts), "fp8/tensor")
        if scales.dim() == 3 and scales.size(2) == 1:
            scales = scales.squeeze(2)
        _require_shape("scales", scales, (experts, n), "[E, N], [E, N, 1], [E] or one scalar; [E, N]")
        return cls(values, scales, "fp8/channel")

    @classmethod
    def from_int4(cls, packed: Tensor, scales: Tensor, group: int = 32) -> "QuantizedWeight":
        """compressed-tensors' pack-quantized int4, symmetric: packed int32 [E, N, K / 8], scales bf16 or fp16
        [E, N, K / group] with groups of 32, 64 or 128 columns."""
        _require_tensors(packed=packed, scales=scales)
        require_dtype("packed", packed, (torch.int32,))
        require_dtype("scales", scales, INT4_SCALES)
        require_one_of("group", group, INT4_GROUPS)
        _require(packed.dim() == 3, f"packed is {list(packed.shape)}; its shape must be [E, N, K / 8]")
        experts, n, words = packed.shape
        k = 8 * words
        _require(
            k % group == 0 and k > 0,
            f"packed is {list(packed.shape)}, so that K is {k}; it must be a multiple of the group, {group}",
        )
        _require_shape("scales", scales, (experts, n, k // group), "[E, N, K / group]")
        return cls(packed, scales, f"int4/{group}")

    @classmethod
    def from_nf4(
        cls,
        packed: Tensor,
        absmax: Tensor,
        shape: Sequence[int],
        blocksize: int = 64,
        nested: Any = None,
        across_experts: bool | None = None,
    ) -> "QuantizedWeight":
        """bitsandbytes' nf4, a stack over experts of what it makes of each [N, K] matrix; `shape` is (E, N, K).

        packed: uint8, E * ceil(N * K / 2) bytes in any shape, the high nibble first. absmax: one fp32 for each
        `blocksize` elements of an expert's flattened matrix, E * ceil(N * K / blocksize) of them.

        nested = (absmax, code, offset) or (absmax, code, offset, blocksize): absmax is itself quantised, as with
        bnb_4bit_use_double_quant, whose names these are: `state2.absmax`, `state2.code`, `offset`, `state2.blocksize`
        (256). Then `absmax` holds its uint8 codes. They are expanded to fp32 here. Where the experts were quantised one
        by one, blocks of codes begin anew with each; where the whole stack was, they run on across experts and there is
        one offset; N * K is then a multiple of `blocksize`. The number of state2.absmax tells which, or its two
        dimensions, or `across_experts`.
        """
        _require_tensors(packed=packed, absmax=absmax)
        require_dtype("packed", packed, (torch.uint8,))
        experts, n, k = _three_sizes(shape)
        require_one_of("blocksize", blocksize, NF4_BLOCKS)
        each = -(-n * k // 2)
        bytes_needed = experts * each
        _require(
            packed.numel() == bytes_needed,
            f"packed is {list(packed.shape)} with {packed.numel()} bytes; shape {(experts, n, k)} has {bytes_needed}",
        )
        blocks = -(-n * k // blocksize)
        _require(
            absmax.numel() == experts * blocks,
            f"absmax is {list(absmax.shape)}; its shape must be [E, ceil(N * K / {blocksize})] = {[experts, blocks]}",
        )
        absmax, across = absmax.reshape(experts, blocks), bool(across_experts)
        if nested is not None:
            absmax, across = _expanded_absmax(absmax, nested, across_experts)
        _require(
            not across or experts <= 1 or n * k % blocksize == 0,
            f"shape is {(experts, n, k)} with blocks across the experts; N * K must be a multiple of the blocksize, "
            f"{blocksize}, so that no block has values of two experts",
        )
        require_dtype("absmax", absmax, (torch.float32,))
        if k % 2:  # rows do not begin with a byte
            return cls(packed.reshape(experts, each), absmax, f"nf4/{blocksize}/{n}x{k}")
        return cls(packed.reshape(experts, n, k // 2), absmax, f"nf4/{blocksize}")

    @property
    def format(self) -> str:
        """ "mxfp4", "fp8", "int4" or "nf4"."""
        return format_of(self.word)

    @property
    def shape(self) -> torch.Size:
        """[E, N, K], that of the weights which it stands for."""
        return self.packed().shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Those of values and scales together."""
        return self.values.nbytes + self.scales.nbytes

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def dim(self) -> int:
        return 3

    def packed(self) -> Packed:
        """What the operators read."""
        return Packed(self.values, self.scales, self.word)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weights [E, N, K] that it stands for: value times scale in fp32, rounded once to bf16, fp16 or fp32."""
        if dtype not in FORMATS:
            raise TypeError(f"dtype is {shown(dtype)}; accepted are {', '.join(map(str, FORMATS))}")
        try:
            return _dequantize(self.values, self.scales, self.word, dtype)
        except RuntimeError as error:
            raise explain(error, {"values": self.values, "scales": self.scales}) from None

    def requires_grad_(self, requires_grad: bool = True) -> "QuantizedWeight":
        if requires_grad:
            raise TypeError(f"requires_grad is True; {REFUSED_GRADIENT}")
        return self

    def extra_repr(self) -> str:
        experts, n, k = self.shape
        return f"{self.word}, experts={experts}, out={n}, in={k}, {self.nbytes} bytes, {self.device}"

    def __getstate__(self) -> dict[str, Any]:
        """With both tensors as bytes: plain pickle cannot read torch's fp8 tensors back."""
        state = self.__dict__.copy()
        given = state.pop("_parameters")
        state["_packed"] = {name: (p.detach().view(torch.uint8), p.dtype) for name, p in given.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        packed = state.pop("_packed")
        super().__setstate__({**state, "_parameters": {}})  # type: ignore[no-untyped-call]
        for name, (tensor, dtype) in packed.items():
            self._parameters[name] = _frozen(tensor.view(dtype))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Values and scales of another dtype mean other weights: torch would convert them without a word."""
        for name in ("values", "scales"):
            given = state_dict.get(prefix + name)
            own: Tensor = getattr(self, name)
            if isinstance(given, Tensor) and given.dtype != own.dtype:
                error_msgs.append(
                    f"{prefix}{name} has dtype {given.dtype}; {own.dtype} is accepted by a weight in {self.word}"
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedWeight":
        """Moves both tensors as bytes: who casts a model's weights means those that have not been quantised."""
        for name in ("values", "scales"):
            old = self._parameters[name]
            assert old is not None
            moved = fn(old.detach().view(torch.uint8))
            if moved.dtype != torch.uint8:
                continue
            made = moved.view(old.dtype)
            if torch._has_compatible_shallow_copy_type(old, made):
                old.data = made
            else:
                self._parameters[name] = _frozen(made)
        return self


def _three_sizes(shape: Any) -> tuple[int, int, int]:
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    _require(
        len(sizes) == 3 and all(hasattr(size, "__index__") and size >= 0 for size in sizes),
        f"shape is {shown(shape)}; three numbers (E, N, K) are accepted",
    )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def _runs_across(absmax: Tensor, experts: int, count: int, blocksize: int, asked: bool | None) -> bool:
    """Whether blocks of an nf4 stack's absmax codes, `count` for each expert, go on from one expert to the next."""
    across, apart = -(-experts * count // blocksize), experts * -(-count // blocksize)
    forms = f"[{across}] across the experts or {[experts, apart // max(1, experts)]} with blocks for each"
    _require(
        absmax.numel() in (across, apart) if asked is None else absmax.numel() == (across if asked else apart),
        f"nested[0] is {list(absmax.shape)} with across_experts={asked}; its shape must be {forms}",
    )
    if asked is not None or experts <= 1 or count % blocksize == 0:
        return bool(asked)  # nothing straddles two experts: both forms mean the same
    if across != apart:
        return absmax.numel() == across
    _require(
        tuple(absmax.shape) == (experts, apart // experts),
        f"nested[0] is {list(absmax.shape)}, which may be {forms}; give the latter two dimensions, or across_experts",
    )
    return False


def _expanded_absmax(codes: Tensor, nested: Any, across_experts: bool | None) -> tuple[Tensor, bool]:
    """absmax in fp32 of its codes [E, B]: code[codes] * absmax[block] + offset; whether blocks run across experts."""
    _require(
        isinstance(nested, Sequence) and len(nested) in (3, 4),
        f"nested is {shown(nested)}; (absmax, code, offset) and (absmax, code, offset, blocksize) are accepted",
    )
    absmax, code, offset, blocksize = (*nested, 256)[:4]
    _require_tensors(**{"nested[0]": absmax, "nested[1]": code})
    require_dtype("absmax", codes, (torch.uint8,))
    _require(code.numel() == 256, f"nested[1] is {list(code.shape)}; a code of 256 numbers is accepted")
    _require(is_integer(blocksize) and blocksize > 0, f"nested[3] is {shown(blocksize)}; a positive number is accepted")
    experts, count = codes.shape
    across = _runs_across(absmax, experts, count, blocksize, across_experts)
    shift = torch.as_tensor(offset, dtype=torch.float32, device=codes.device).reshape(-1, 1)
    _require(
        shift.size(0) == 1 or (shift.size(0) == experts and not across),
        f"nested[2] has {shift.size(0)} numbers; {'1' if across else f'1 or one for each of {experts} experts'} "
        "is accepted",
    )
    return expand_absmax(codes, absmax, code, shift, blocksize, across), across


def expand_absmax(
    codes: Tensor, absmax: Tensor, code: Tensor, shift: Tensor, blocksize: int, across_experts: bool
) -> Tensor:
    """code[codes] * absmax[block] + shift of codes [E, B], whose blocks go on across experts or begin with each."""
    experts, count = codes.shape
    if across_experts:
        steps = absmax.float().flatten().repeat_interleave(blocksize)[: experts * count].view(experts, count)
    else:
        steps = absmax.float().reshape(experts, -(-count // blocksize)).repeat_interleave(blocksize, 1)[:, :count]
    return code.float().flatten()[codes.long()] * steps + shift


def packed_of(name: str, w: Any) -> Any:
    """A QuantizedWeight as the products take it, of DTensors this rank's part; anything else as it is. Refuses one that
    is asked for a gradient."""
    if isinstance(w, QuantizedWeight):
        values, scales = local_weight(name, w.values), local_weight(f"{name}.scales", w.scales)
        w = Packed(values, scales, w.word)
    elif not isinstance(w, Packed):
        return w
    if torch.is_grad_enabled() and (w.values.requires_grad or w.scales.requires_grad):
        raise TypeError(f"{name} is in {w.word} and requires a gradient; {REFUSED_GRADIENT}")
    return w


def refuse_operands(**operands: object) -> None:
    """For the operands of dW, which a caller of it may take W for."""
    for name, value in operands.items():
        if isinstance(value, QuantizedWeight | Packed):
            raise TypeError(f"{name} is a quantised weight in {value.word}; {REFUSED_GRADIENT}")


def weight_of(name: str, w: Any) -> Any:
    """W as a product takes it: a QuantizedWeight as Packed, of a DTensor this rank's part."""
    if type(w) in PLAIN_TENSORS:
        return w
    w = packed_of(name, w)
    return w if type(w) is Packed else local_weight(name, w)


def mesh_of(w: Any) -> Any:
    """The mesh over which the experts of W are spread, one dimension of it; None where they are not."""
    return mesh_of_experts(w.values if isinstance(w, QuantizedWeight) else w)
