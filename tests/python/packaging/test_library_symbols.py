"""What the compiled operators ask of other libraries."""

import re
import shutil
import subprocess

import pytest
from moegemm.operators.loading import candidates

STANDARD_LIBRARY = re.compile(r"_ZN?K?[RO]?St")  # names in namespace std


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, of binutils")
def test_the_standard_library_is_bound_to_its_own_versions():
    """torch's wheels export parts of the libstdc++ of their compiler, without versions. Bound to those, the operators
    would run another release's std::filesystem and std::string than they were compiled for."""
    library = next(path for path in candidates() if path.exists())
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert any(STANDARD_LIBRARY.match(name) for name in names)
    assert [name for name in names if STANDARD_LIBRARY.match(name) and "@" not in name] == []
