"""Every class of experts of the installed transformers that asks its interface: what their eager code computes."""

import importlib
from pathlib import Path

import pytest
import torch
from tiny_models import assert_same, routing

transformers = pytest.importorskip("transformers")
importlib.import_module("moegemm.transformers")

EXPERTS, HIDDEN = 6, 32
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "moe_hidden_size": HIDDEN,
}  # fmt: skip
# Of models that are dense unless asked.
OPTIONAL = {"num_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_intermediate_size": 24}
FOLDER = Path(transformers.__file__).parent / "models"
FAMILIES = sorted(
    file.parent.name for file in FOLDER.glob("*/modeling_*.py") if "@use_experts_implementation" in file.read_text()
)


def classes_of(module, base) -> list[type]:
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    return [kind for kind in found if kind.__module__ == module.__name__]


def small(config_class, **more):
    config = config_class()
    for name, size in SIZES.items():
        if name in config.attribute_map or not hasattr(config, name):
            continue
        if isinstance(getattr(config, name), int | list):  # a list is of text and of images
            setattr(config, name, size)
    for name, size in more.items():
        setattr(config, name, size)
    return config


def made(kind, config_classes):
    """The experts in some configuration of the family, with weights."""
    for config_class in config_classes:
        for more in ({}, OPTIONAL):
            try:
                config = small(config_class, **more)
                with torch.device("meta"):
                    count = sum(parameter.numel() for parameter in kind(config).parameters())
            except Exception:  # a configuration of another part: images, sound
                continue
            if count > 1e6:  # which names its sizes otherwise
                continue
            experts = kind(config)
            with torch.no_grad():
                for parameter in experts.parameters():
                    parameter.copy_(torch.randn(parameter.shape) * 0.3)
            return experts
    return None


def outputs_and_gradients(experts, implementation, x, ids, weights):
    experts.config._experts_implementation_internal = implementation
    x, weights = (t.clone().requires_grad_() for t in (x, weights))
    out = experts(x, ids, weights)
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.filterwarnings("ignore:moegemm. .* in torch, between moegemm's products:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_its_experts_run_as_their_eager_code_does(family):
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    configs = classes_of(configuration, transformers.PreTrainedConfig)
    kinds = [kind for kind in classes_of(modeling, torch.nn.Module) if hasattr(kind, "_apply_gate")]
    found = [experts for experts in (made(kind, configs) for kind in kinds) if experts is not None]
    if not found:
        pytest.skip(f"no experts of {family} can be made from its defaults")
    for experts in found:
        ids, weights = routing(experts.down_proj.size(0), 20)
        first = experts.gate_up_proj if experts.has_gate else experts.up_proj
        x = torch.randn(20, first.size(1 if experts.is_transposed else 2))
        got, expected = (outputs_and_gradients(experts, name, x, ids, weights) for name in ("moegemm", "eager"))
        assert_same(got, expected, 3e-5)
