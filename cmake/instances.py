"""The compiled kernels that a list in src/cuda/instances names, and the sources for the compiler.

    instances.py --list=FILE --formats=FILE --folder=FOLDER --arch=90 [--exact] [--together=FIELD,FIELD...]

Lines are MOEGEMM_<FAMILY>_GEMM(.field = value, ...). One translation unit is written for each line and element type,
so that they build in parallel, or for all lines that agree in the fields of --together. --arch and --exact are those of
lines that name no architecture; --formats is the header that says which element types tensor cores multiply. Prints
"source architecture exact" for each unit. Files that would not change are left as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINE = re.compile(r"MOEGEMM_([A-Z0-9]+)_GEMM\(([^)]*)\)")
FIELD = re.compile(r"\.(\w+) = (?:\w+::)?(\w+)")
FORMATS = re.compile(r"^using TensorCoreFormats.*$", re.MULTILINE)
SOURCE = """#include "cuda/{generation}/{family}_gemm/kernel.cuh"

namespace moegemm::cuda::{generation} {{
{kernels}}}
"""


class Kernel:
    """One line: its family in small letters, its fields as C++ and by name, the last words of their values."""

    def __init__(self, family: str, fields: str, arch: int = 80, exact: bool = False) -> None:
        self.family, self.fields = family.lower(), fields
        self.type = family.capitalize() + "Gemm"
        self.named = {name: name if value == "true" else value for name, value in FIELD.findall(fields)}
        self.arch, self.exact = arch, exact
        if "arch" in self.named:
            self.arch, self.exact = int(self.named["arch"]), "exact" in self.named

    def dtypes(self, of_tensor_cores: list[str]) -> list[str]:
        """The element types that it is compiled for."""
        if self.named.get("math") in ("kFloat", "kTf32") or self.family.startswith("tf32"):
            return ["kFloat32"]
        if self.family in ("quantised", "stream"):  # what quantised models run in
            return ["kBFloat16"]
        return of_tensor_cores


def kernels_of(listed: Path, arch: int = 80, exact: bool = False) -> list[Kernel]:
    lines = [line for line in listed.read_text().splitlines() if line and line[0] not in "/#"]
    text = re.sub(" +", " ", " ".join(lines))
    return [Kernel(family, fields, arch, exact) for family, fields in LINE.findall(text)]


def main(arguments: list[str]) -> int:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in arguments)
    listed, folder = Path(options["list"]), Path(options["folder"])
    together = options["together"].split(",") if "together" in options else None
    formats = re.findall("k[A-Z][A-Za-z0-9]+", FORMATS.search(Path(options["formats"]).read_text())[0])
    units: dict[str, tuple[Kernel, list[str]]] = {}
    for kernel in kernels_of(listed, int(options["arch"]), "exact" in options):
        for dtype in kernel.dtypes(formats):
            values = [*kernel.named.values(), dtype]
            if together is not None:
                values = [kernel.named[field] for field in together if field in kernel.named]
            name = "_".join([listed.stem, kernel.family, "gemm", *values])
            units.setdefault(name, (kernel, []))[1].append(
                f"template KernelFunctions {kernel.family}_gemm_functions"
                f"<{kernel.type}{{{kernel.fields}}}, DType::{dtype}>();\n"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kernel, instances) in units.items():
        source = folder / f"{name}.cu"
        text = SOURCE.format(generation=listed.stem, family=kernel.family, kernels="".join(instances))
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        print(source, kernel.arch, "TRUE" if kernel.exact else "FALSE")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
