"""A kernel of the Hugging Face Hub: the layout that the `kernels` library loads, here from a folder."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from moegemm.operators import loading
from programs import load_program

ROOT = Path(__file__).parents[3]
HUB = ROOT / ".venv" / "hub"  # where the library is, apart from transformers
# The operators of the build under test are in their usual namespace, so that moegemm itself must not be imported.
CHECK = """
import pathlib, sys
import torch
from kernels import get_local_kernel

kernel = get_local_kernel(pathlib.Path(sys.argv[1]), backend="cpu")
assert "moegemm" not in sys.modules and kernel.__name__ == "_moegemm_test", kernel.__name__
x, w = torch.randn(6, 16), torch.randn(4, 8, 16)
ids = torch.randn(6, 4).topk(2).indices
m_sizes, gather = kernel.route(ids, 4)
y = kernel.grouped_gemm(x, w, m_sizes, 2, gather, permute_x=True)
expected = torch.stack([w[e] @ x[t] for t, row in enumerate(ids) for e in row])[gather.long()]
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
print(kernel.info()["version"])
"""


@pytest.fixture(scope="module")
def hub():
    return load_program("scripts/package/hub_kernel.py")


def test_modules_import_each_other_relatively(hub):
    text = (
        "import torch\nfrom moegemm.operators.loading import ops\n    from moegemm import layer\n>>> import moegemm\n"
    )
    expected = "import torch\nfrom ..operators.loading import ops\n    from .. import layer\n>>> import moegemm\n"
    assert hub.made_relative(text, 2, "tuning/x.py") == expected
    with pytest.raises(SystemExit, match="imports moegemm by name"):
        hub.made_relative("import moegemm\n", 1, "x.py")


def test_what_is_left_out_exists_and_nothing_else_needs_it(hub, tmp_path):
    package = ROOT / "python" / "moegemm"
    made_by_a_build = {"lib", "__pycache__"}
    left_out = set(hub.LEFT_OUT) - made_by_a_build
    assert [name for name in left_out if not (package / name).exists()] == []
    hub.copy_package(tmp_path, "moegemm_test")
    modules = "|".join(name.removesuffix(".py") for name in left_out)
    for path in tmp_path.rglob("*.py"):
        assert not re.search(rf"^\s*from \.+({modules})\b", path.read_text(), re.MULTILINE), path


@pytest.fixture
def copied(hub, tmp_path, monkeypatch) -> Path:
    """A checkout of the sources alone."""
    for name in hub.SOURCES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("lib", "__pycache__"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(hub, "ROOT", tmp_path)
    return tmp_path


def test_every_source_counts_for_the_namespace(hub, copied):
    places = ["include", "src", "bindings", "python", "testing", "cmake", "data/models.json", "CMakeLists.txt"]
    seen = {hub.digest()}
    for count, name in enumerate(places, start=2):
        path = next(p for p in [copied / name, *sorted((copied / name).rglob("*.*"))] if p.is_file())
        path.write_text(path.read_text() + "\n")
        seen.add(hub.digest())
        assert len(seen) == count, name
    (copied / "python" / "moegemm" / "lib").mkdir()
    (copied / "python" / "moegemm" / "lib" / "made_by_a_build.so").write_text("x")
    assert hub.digest() in seen


def test_kernel_is_for_the_gpus_that_are_named(hub, monkeypatch):
    every = ["8.0+PTX", "8.6", "8.9", "9.0", "10.0", "12.0"]
    for named, archs, of_cmake in (("", every, ""), ("all", every, ""), ("86, 90", ["8.6+PTX", "9.0"], "86;90")):
        monkeypatch.setenv("CUDA_ARCHS", named)
        assert hub.metadata_of("cuda", "x")["backend"] == {"type": "cuda", "archs": archs}
        assert hub.named_archs() == of_cmake
    assert '@CUDA_ARCHS="$(CUDA_ARCHS)" $(VENV_PYTHON) scripts/package/hub' in (ROOT / "Makefile").read_text()


def test_licences_lie_beside_the_variants(hub, tmp_path):
    variant = hub.lay_out("cpu", "moegemm", loading.found_library().resolve(), tmp_path)
    assert variant.is_relative_to(tmp_path / "build")
    assert {path.name for path in tmp_path.iterdir()} == {"build", "LICENSE", "THIRD_PARTY_LICENSES"}


def test_kernels_loads_the_layout(hub, tmp_path):
    if not (HUB / "kernels").is_dir() and importlib.util.find_spec("kernels") is None:
        pytest.skip("the library `kernels` is not installed")
    library = loading.found_library()
    variant = hub.lay_out("cpu", "moegemm", library.resolve(), tmp_path)
    described = variant / "metadata.json"
    described.write_text(described.read_text().replace('"id": "moegemm"', '"id": "_moegemm_test"'))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MOEGEMM"))}
    clean["PYTHONPATH"] = str(HUB)
    done = subprocess.run(
        [sys.executable, "-c", CHECK, tmp_path], env=clean, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
