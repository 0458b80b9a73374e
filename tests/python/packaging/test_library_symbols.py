"""What the compiled operators share with other libraries of the process."""

import re
import shutil
import subprocess

import pytest
from moegemm.operators.loading import found_library

STANDARD_LIBRARY = re.compile(r"_ZN?K?[RO]?S[tsod]|__cxa_|__gxx_|_Unwind_")  # std, and the runtime of exceptions
COMPILED_ONCE = set("TDBR")  # not templates, which every library has


def symbols(which: str) -> list[tuple[str, str]]:
    """Type and name, with @ and a version if it has one."""
    library = found_library()
    listed = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout
    pairs = [line.split()[-2:] for line in listed.splitlines()]
    return [(kind, name) for kind, name in pairs if STANDARD_LIBRARY.match(name)]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of binutils")
def test_the_standard_library_is_bound_to_its_own_versions():
    """torch's wheels export parts of the libstdc++ of their compiler, without versions. Bound to those, the operators
    would run another release's std::filesystem and std::string than they were compiled for."""
    assert [name for kind, name in symbols("--undefined-only") if kind == "U" and "@" not in name] == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of binutils")
def test_no_copy_of_the_standard_library_is_exported():
    """With a compiler that has a static libstdc++ alone, the operators hold a copy. Exported, it would mix with the
    process's own: a refused call then crashes."""
    assert [name for kind, name in symbols("--defined-only") if kind in COMPILED_ONCE] == []
