"""A layer compiled ahead of time, as a package that runs without Python code."""

import functools
import shutil
import subprocess
import sys

import moegemm
import pytest
import torch
from layer_reference import make_layer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")


_TORCH_ALONE = """
import sys, torch
module, x = torch.nn.Linear(8, 8, device=sys.argv[1]), torch.ones(4, 8, device=sys.argv[1])
path = torch._inductor.aoti_compile_and_package(torch.export.export(module, (x,)), package_path=sys.argv[2])
torch._inductor.aoti_load_package(path)
"""


@functools.cache
def torch_loads_its_own_packages(device, folder) -> bool:
    """Some builds of torch with CUDA crash while loading the package of a module of their own."""
    command = [sys.executable, "-c", _TORCH_ALONE, device, str(folder / "alone.pt2")]
    return subprocess.run(command, capture_output=True).returncode == 0


class _Mlp(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.ids, self.options = layer.expert_ids, layer.options
        for name, tensor in layer.given().items():
            if name != "x":
                self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        tensors = dict(self.named_buffers())
        router_weights = tensors.pop("router_weights")
        return moegemm.moe_mlp(x, expert_ids=ids, router_weights=router_weights, **tensors, **self.options)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_a_layer_compiles_ahead_of_time(device, activation, tmp_path):
    if torch.cuda.is_available() and not torch_loads_its_own_packages(device, tmp_path.parent):
        pytest.skip(f"torch {torch.__version__} crashes on a package of its own")
    layer = make_layer(device, activation=activation, bias=True)
    module = _Mlp(layer).eval()
    arguments = (layer.tensors["x"], layer.expert_ids)
    expected = module(*arguments)
    exported = torch.export.export(module, arguments)
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
    assert torch.equal(torch._inductor.aoti_load_package(path)(*arguments), expected)


def test_no_limit_means_none_for_any_number(device):
    """What stands for no limit must not clamp: infinities stay what they are."""
    layer = make_layer(device, activation="relu2", dtype=torch.bfloat16)
    layer.tensors["x"].fill_(3e38)
    out = _Mlp(layer)(layer.tensors["x"], layer.expert_ids)
    pre = torch.tensor([[3e38, float("inf"), 2.0]], device=device)
    m_sizes = torch.tensor([1], device=device)
    activation = moegemm.activations.activation_named("silu", "concatenated", None, None, None)
    act = torch.ops.moegemm.activate(pre, None, m_sizes, activation.text())
    assert torch.equal(act[0, :2], pre[0, :2])
    assert not torch.isfinite(out).all()
