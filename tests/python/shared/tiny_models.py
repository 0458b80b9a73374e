"""Small random-weight MoE models of transformers: a few thousand parameters, two layers, real code paths."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3_moe() -> tuple[str, dict]:
    return "Qwen3Moe", {
        "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
        "norm_topk_prob": True,
    }  # fmt: skip


def mixtral() -> tuple[str, dict]:
    return "Mixtral", {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2}


def olmoe() -> tuple[str, dict]:
    return "Olmoe", {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}


def deepseek_v3() -> tuple[str, dict]:
    return "DeepseekV3", {
        "intermediate_size": 48, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    }  # fmt: skip


def gpt_oss() -> tuple[str, dict]:
    return "GptOss", {
        "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 16,
    }  # fmt: skip


def llama4() -> tuple[str, dict]:
    return "Llama4Text", {
        "intermediate_size": 40, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
        "head_dim": 8, "interleave_moe_layer_step": 1,
    }  # fmt: skip


FAMILIES = {f.__name__: f for f in (qwen3_moe, mixtral, olmoe, deepseek_v3, gpt_oss, llama4)}
DISPATCHED = [name for name in FAMILIES if name != "llama4"]  # Llama 4 does not ask the experts interface


def build(family: str, implementation: str | None = None, **changes: object) -> torch.nn.Module:
    """A model in fp32 with the same weights for each call."""
    prefix, sizes = FAMILIES[family]()
    config_class = getattr(transformers, f"{prefix}Config", None)
    model_class = getattr(transformers, "Llama4ForCausalLM" if family == "llama4" else f"{prefix}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no {prefix}")
    config = config_class(**{**SMALL, **sizes, **changes})
    config._attn_implementation = "eager"
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():  # some experts start empty or at zero
        for name, parameter in sorted(model.named_parameters()):
            if "expert" in name or "bias" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model


def token_ids(batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def outputs_and_gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits, and the gradient of a loss for every parameter that has one."""
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), **gradients}


def experts_of(model: torch.nn.Module) -> torch.nn.Module:
    """The experts module of its first expert layer."""
    return next(m for m in model.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj.dim() == 3)


def routing(experts: int, tokens: int = 40, topk: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids and router weights, [T, topk] each."""
    weights, ids = torch.rand(tokens, experts).softmax(-1).topk(topk)
    return ids, weights


def assert_same(got: dict, expected: dict, tolerance: float) -> None:
    """Each tensor of two results is the same but for a share of its norm."""
    assert got.keys() == expected.keys()
    for name, value in got.items():
        error = (value.double() - expected[name].double()).norm()
        assert error <= tolerance * max(expected[name].double().norm().item(), 1e-6), f"{name}: off by {error}"


def randomise_adapters(model: torch.nn.Module, seed: int, scale: float) -> torch.nn.Module:
    """PEFT's factors, some of which start at zero, become others that are the same for each call."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model
