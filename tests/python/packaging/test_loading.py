"""An installation that cannot work says so in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from moegemm.operators import loading

PACKAGE_PARENT = Path(loading.__file__).parents[2]


def import_error(code: str = "", **environment: str) -> str:
    """What `import moegemm` says in a fresh process."""
    program = f"import torch\n{code}\ntry:\n    import moegemm\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1, done.stdout + done.stderr
    return lines[0]


def test_missing_library(tmp_path):
    message = import_error(MOEGEMM_TORCH_LIBRARY=str(tmp_path / "gone.so"))
    assert "found no compiled operators" in message
    assert "gone.so" in message
    assert "MOEGEMM_BUILD_TORCH=ON" in message


def test_old_torch():
    assert import_error("torch.__version__ = '2.9.1+cu126'") == (
        "moegemm found torch 2.9.1+cu126; torch 2.10 or newer is needed"
    )


def test_not_a_library(tmp_path):
    (tmp_path / "libmoegemm_torch.so").write_text("not an ELF file")
    message = import_error(MOEGEMM_TORCH_LIBRARY=str(tmp_path / "libmoegemm_torch.so"))
    assert "does not load with torch" in message
    assert "torch 2.10 or newer" in message


def test_undefined_symbol(tmp_path):
    source = tmp_path / "broken.c"
    source.write_text("void gone_from_torch(void);\n__attribute__((constructor)) static void go(void)"
                      "{ gone_from_torch(); }\n")  # fmt: skip
    library = tmp_path / "libmoegemm_torch.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-z,now", "-o", library, source], check=True)
    message = import_error(MOEGEMM_TORCH_LIBRARY=str(library))
    assert "gone_from_torch" in message
    assert "does not load with torch" in message


@pytest.mark.parametrize(
    ("version", "release"), [("2.10.0", (2, 10)), ("2.13.0+cpu", (2, 13)), ("3.0.0a0+git1", (3, 0)), ("odd", (0, 0))]
)
def test_torch_release(version, release):
    assert loading.torch_release(version) == release


def test_the_library_needs_nothing_of_torch_but_libtorch_cpu():
    library = next(path for path in loading.candidates() if path.is_file())
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed
    for other in ("libtorch_python", "libpython", "libtorch_cuda", "libc10", "RUNPATH", "RPATH", "libmoegemm.so"):
        assert other not in needed
