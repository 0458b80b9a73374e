"""Small random checkpoints on disk in the formats of gpt-oss (MXFP4) and of `*-FP8` (e4m3 in 128 x 128 blocks)."""

import importlib
import json
from pathlib import Path
from typing import Any

import moegemm
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build

SIZES = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 384, "intermediate_size": 128, "head_dim": 32},
}


def _mxfp4(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As openai/gpt-oss-20b: blocks [E, N, K / 32, 16] and scales [E, N, K / 32] of the experts, all else in bf16."""
    stored = {}
    for name, tensor in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weight = moegemm.quantize(tensor.transpose(1, 2).contiguous(), "mxfp4")
            stored[f"{name}_blocks"] = weight.values.unflatten(-1, (-1, 16)).contiguous()
            stored[f"{name}_scales"] = weight.scales.data
        else:
            stored[name] = tensor.bfloat16()
    return stored


def _fp8_linear(name: str, tensor: torch.Tensor, scales: torch.dtype) -> dict[str, torch.Tensor]:
    weight = moegemm.quantize(tensor.unsqueeze(0), "fp8", scale_dtype=scales)
    return {name: weight.values[0].clone(), f"{name}_scale_inv": weight.scales[0].clone()}


def _fp8(state: dict[str, torch.Tensor], scales: torch.dtype) -> dict[str, torch.Tensor]:
    """As Qwen/Qwen3-30B-A3B-FP8: every linear layer but the routers and lm_head, each expert on its own."""
    stored = {}
    for name, tensor in state.items():
        prefix = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, w in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    stored.update(_fp8_linear(f"{prefix}{expert}.{part}.weight", w, scales))
        elif name.endswith("experts.down_proj"):
            for expert, w in enumerate(tensor):
                stored.update(_fp8_linear(f"{prefix}{expert}.down_proj.weight", w, scales))
        elif name.endswith("_proj.weight"):
            stored.update(_fp8_linear(name, tensor, scales))
        else:
            stored[name] = tensor.bfloat16()
    return stored


def write_checkpoint(family: str, folder: Path, scales: torch.dtype = torch.float32) -> Path:
    """safetensors and config.json, with nothing that says moegemm."""
    model = build(family, **SIZES[family])
    config = model.config.to_dict()
    config["architectures"], config["dtype"] = [type(model).__name__], "bfloat16"
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    skipped = ["model.embed_tokens", "lm_head"]
    if family == "gpt_oss":
        stored = _mxfp4(state)
        skipped += ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    else:
        stored = _fp8(state, scales)
        skipped += [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
        config["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
            "modules_to_not_convert": skipped,
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _scales_of_blocks(name: str, values: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Powers of two around 1 / 4096. One for each tensor has two dimensions where experts are stacked."""
    rows, columns = (1, 1) if block is None else (-(-size // of) for size, of in zip(values.shape, block, strict=True))
    exponents = torch.arange(rows * columns).view(rows, columns) % 3 + len(name) % 4 - 14
    scales = torch.exp2(exponents.float())
    return scales if block is not None or "experts" in name else scales.reshape(())


def with_blocks(path: Path, folder: Path, block: tuple[int, int] | None, method: str = "fp8") -> Path:
    """An fp8 checkpoint again, with the same values and other scales: of these blocks, or one for each tensor."""
    state = load_file(path / "model.safetensors")
    for name in [name for name in state if name.endswith("_scale_inv")]:
        scales = _scales_of_blocks(name, state[name.removesuffix("_scale_inv")], block)
        state[name] = scales.to(torch.float8_e8m0fnu).view(torch.uint8) if method == "mxfp8" else scales
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"].update(quant_method=method, weight_block_size=block)
    if method == "mxfp8":
        config["quantization_config"]["scale_fmt"] = "ue8m0"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(path: Path, device: str = "cpu", **changes: Any) -> Any:
    """The causal language model there, on moegemm in bf16."""
    transformers: Any = importlib.import_module("transformers")
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager", **changes}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="moegemm", **options)
    return model.to(device)


def experts_of(model: Any) -> list[Any]:
    return [m for name, m in model.named_modules() if name.endswith("mlp.experts")]
