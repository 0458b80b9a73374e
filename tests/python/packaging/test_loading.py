"""An installation that cannot work says so in one sentence."""

import os
import re
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


def imported_with(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import moegemm"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_PARENT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_variable_that_means_nothing_is_warned_of():
    done = imported_with(MOEGEMM_BACKENDS="cpu", MOEGEMM_TEST_ANYTHING="1")
    assert done.returncode == 0
    assert "UserWarning: moegemm: the environment variable MOEGEMM_BACKENDS means nothing; known are" in done.stderr
    assert "MOEGEMM_TEST_ANYTHING" not in done.stderr


def test_every_variable_of_the_package_is_known():
    sources = [*PACKAGE_PARENT.rglob("*.py"), *(PACKAGE_PARENT.parent / "src").rglob("*.cpp")]
    read = r'(?:environ(?:\.get)?[(\[]|getenv\(|read\(|variable\(|VARIABLE = )"(MOEGEMM_[A-Z_]+)"'
    names = {name for source in sources for name in re.findall(read, source.read_text())}
    assert {"MOEGEMM_CACHE_DIR", "MOEGEMM_CPU_ISA", "MOEGEMM_TORCH_LIBRARY", "MOEGEMM_NUM_THREADS"} <= names
    known = imported_with(MOEGEMM_NO_SUCH_NAME="1").stderr.split("known are ")[1].split("\n")[0].split(", ")
    assert names <= set(known)


def test_bad_word_for_early_loading_is_refused():
    done = imported_with(MOEGEMM_LOAD_EARLY="banana")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: MOEGEMM_LOAD_EARLY is 'banana'; accepted are 0 and 1\n")


def test_missing_library(tmp_path):
    message = import_error(MOEGEMM_TORCH_LIBRARY=str(tmp_path / "gone.so"))
    assert "found no compiled operators" in message
    assert "gone.so" in message
    assert "MOEGEMM_BUILD_TORCH=ON" in message


def test_old_torch():
    assert import_error("torch.__version__ = '2.9.1+cu126'") == (
        "moegemm found torch 2.9.1+cu126; torch 2.10 or newer is needed: pip install --upgrade torch"
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
    library = loading.found_library()
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in needed
    for other in ("libtorch_python", "libpython", "libtorch_cuda", "libc10", "RUNPATH", "RPATH", "libmoegemm.so"):
        assert other not in needed
