"""The wheel: built without isolation or downloads, one file for every Python 3, works in a clean environment."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[3]
VERSION = re.findall(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)[0]
# Not where `make wheel` builds: CMake forgets its settings when it meets another compiler in its folder.
BUILD_FOLDER = REPOSITORY / "build" / "wheel-of-the-tests"
EXAMPLE = """
import torch, moegemm
assert ".whl" not in moegemm.__file__ and "site-packages" in moegemm.__file__, moegemm.__file__
X, W = torch.randn(6, 16, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
weights, ids = torch.randn(6, 4).softmax(-1).topk(2)
m_sizes, gather_indices = moegemm.route(ids, 4)
Y = moegemm.grouped_gemm(X, W, m_sizes, 2, gather_indices, permute_x=True)
Y.sum().backward()
print(tuple(Y.shape), tuple(W.grad.shape), moegemm.info()["version"])
"""


def cuda_setting() -> str:
    """That of the build under test, whose objects ccache then has; without ccache, kernels are not compiled twice."""
    link = REPOSITORY / "python" / "moegemm" / "lib" / "libmoegemm_torch.so"
    if shutil.which("ccache"):
        for parent in link.resolve().parents:
            if (parent / "CMakeCache.txt").is_file():
                found = re.search(r"^MOEGEMM_CUDA:\w+=(\w+)", (parent / "CMakeCache.txt").read_text(), re.MULTILINE)
                return found[1] if found else "AUTO"
    return "OFF"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    out = tmp_path_factory.mktemp("wheel")
    settings = {"build-dir": str(BUILD_FOLDER), "cmake.define.MOEGEMM_CUDA": cuda_setting()}
    settings["cmake.define.MOEGEMM_GLIBC"] = "2.28"  # as `make wheel` links it
    if shutil.which("ccache"):
        settings |= {f"cmake.define.CMAKE_{language}_COMPILER_LAUNCHER": "ccache" for language in ("CXX", "CUDA")}
        # By the name that CMake uses by itself: to ccache, g++ is another compiler than c++.
        settings["cmake.define.CMAKE_CXX_COMPILER"] = shutil.which("c++") or "c++"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    command += [f"--config-settings={name}={value}" for name, value in settings.items()]
    done = subprocess.run([*command, "-w", str(out), str(REPOSITORY)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_make_wheel_and_the_tests_build_in_folders_of_their_own():
    (folder,) = re.findall(r'^build-dir = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert REPOSITORY / folder != BUILD_FOLDER


def test_the_wheel_is_for_every_python_3_and_holds_one_library(wheel):
    assert "-py3-none-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert [n for n in names if n.endswith(".so") or ".so." in n] == ["moegemm/libmoegemm_torch.so"]
    assert "moegemm/py.typed" in names
    assert {n.split("/licenses/")[1] for n in names if "/licenses/" in n} == {"LICENSE", "THIRD_PARTY_LICENSES"}
    assert "moegemm/bench/models.json" in names
    assert all(n.startswith(("moegemm/", "moegemm-")) for n in names)


def test_the_library_needs_no_newer_system_than_torch_does(wheel, tmp_path):
    library = zipfile.ZipFile(wheel).extract("moegemm/libmoegemm_torch.so", tmp_path)
    symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # of manylinux_2_28
    needed = set(re.findall(r"\((GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\)", symbols))
    assert {family for family, _ in needed} == set(newest)
    assert [name for name in needed if tuple(map(int, name[1].split("."))) > newest[name[0]]] == []
    # Found there by systems whose glibc is older than 2.34.
    parts = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert all(name in parts for name in ("libpthread.so.0", "libdl.so.2", "librt.so.1"))


def test_the_wheel_works_in_a_clean_environment(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "env" / "lib" / version / "site-packages"
    # torch is too large to install again; the environment may see this one's packages, but not this checkout.
    folders = {sysconfig.get_paths()["purelib"], str(Path(torch.__file__).parents[1])}
    (site / "torch_of_the_tests.pth").write_text("\n".join(folders) + "\n")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MOEGEMM"))}
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*install, str(wheel)], check=True, env=clean, cwd=tmp_path)
    done = subprocess.run([python, "-c", EXAMPLE], capture_output=True, text=True, env=clean, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"(12, 8) (4, 8, 16) {VERSION}"
    bench = [tmp_path / "env" / "bin" / "moegemm-bench", "--help"]
    done = subprocess.run(bench, capture_output=True, text=True, env=clean, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "--planner" in done.stdout
    for program in ([tmp_path / "env" / "bin" / "moegemm"], [python, "-m", "moegemm"]):
        done = subprocess.run([*program, "info"], capture_output=True, text=True, env=clean, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"moegemm {VERSION}\n")
