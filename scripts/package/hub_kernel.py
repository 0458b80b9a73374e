#!/usr/bin/env python3
"""Makes dist/hub, a repository that Hugging Face's library `kernels` loads: build/<variant>/moegemm and metadata.json.

    scripts/package/hub_kernel.py cpu [OPTIONS OF CMAKE]     # or cuda; variants add up in dist/hub
    CUDA_ARCHS=80,90 scripts/package/hub_kernel.py cuda      # kernels for these GPUs alone
    python -c 'import kernels, pathlib; kernels.get_local_kernel(pathlib.Path("dist/hub"))'

Such a kernel may be loaded beside an installed moegemm or another version of itself. So its operators have a namespace
of their own, and its modules import each other relatively.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "dist" / "hub"
OLDEST_TORCH = "210"  # the stable ABI that the operators use
KERNEL_VERSION = 1  # of the interface, as the Hub counts
GLIBC = "2.28"
# Programs, which the Hub has no use for. Plans and reports need the package `program`.
LEFT_OUT = ("bench", "lib", "__main__.py", "__pycache__")
# `testing` and the catalogue of models are in the program that the operators hold.
SOURCES = ("CMakeLists.txt", "bindings", "cmake", "data/models.json", "include", "python", "src", "testing")
LICENCES = ("LICENSE", "THIRD_PARTY_LICENSES")
EVERY_ARCH = "80;86;89;90;100;120"  # what CMake makes of `all`
IMPORT = re.compile(r"^(\s*)from moegemm(?:\.([\w.]+))? import ", re.MULTILINE)
PLAIN_IMPORT = re.compile(r"^\s*import moegemm\b", re.MULTILINE)
OPS = '''"""The operators' namespace, which no other version has."""

NAMESPACE = "{namespace}"


def add_op_namespace_prefix(name: str) -> str:
    return f"{{NAMESPACE}}::{{name}}"
'''


def digest() -> str:
    """Of everything that is compiled or imported."""
    whole = hashlib.sha256()
    for name in SOURCES:
        for path in sorted((ROOT / name).rglob("*")) or [ROOT / name]:
            place = path.relative_to(ROOT)
            if path.is_file() and not {"lib", "__pycache__"} & set(place.parts):
                whole.update(place.as_posix().encode() + path.read_bytes())
    return whole.hexdigest()[:8]


def named_archs() -> str:
    """As CMake wants them; empty: every GPU."""
    return ";".join(re.findall(r"\w+", os.environ.get("CUDA_ARCHS", "").replace("all", "")))


def made_relative(text: str, depth: int, name: str) -> str:
    """A module's text without the name of the package; `depth` is 1 for a module of the package itself."""
    if PLAIN_IMPORT.search(text):
        raise SystemExit(f"{name} imports moegemm by name: a kernel of the Hub has another one")
    return IMPORT.sub(lambda found: f"{found[1]}from {'.' * depth}{found[2] or ''} import ", text)


def copy_package(target: Path, namespace: str) -> None:
    source = ROOT / "python" / "moegemm"
    for path in sorted(source.rglob("*.py")):
        place = path.relative_to(source)
        if place.parts[0] in LEFT_OUT or "__pycache__" in place.parts:
            continue
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        (target / place).write_text(made_relative(path.read_text(), len(place.parts), place.as_posix()))
    (target / "_ops.py").write_text(OPS.format(namespace=namespace))


def build(backend: str, namespace: str, options: list[str]) -> Path:
    """The operators in their namespace; all objects but one are those of the wheel."""
    folder = f"build/hub-{backend}"
    kernels = ["-DMOEGEMM_CUDA=ON", f"-DMOEGEMM_CUDA_ARCHS={named_archs() or 'all'}"]
    cuda = kernels if backend == "cuda" else ["-DMOEGEMM_CUDA=OFF"]
    configure = ["cmake", "--preset", "release", "-B", folder, "-DMOEGEMM_BUILD_TORCH=ON", "-DMOEGEMM_BUILD_TESTS=OFF"]
    configure += [f"-DMOEGEMM_GLIBC={GLIBC}", f"-DMOEGEMM_TORCH_NAMESPACE={namespace}", *cuda, *options]
    compile_it = ["cmake", "--build", folder, "-t", "moegemm_torch"]
    for name, command in (("Configure", configure), ("Compile", compile_it)):
        log = f"build/logs/hub-{backend}-{name.lower()}.log"
        subprocess.run(["scripts/step", f"{name} (hub, {backend})", log, *command], cwd=ROOT, check=True)
    return ROOT / folder / "bindings" / "torch" / "libmoegemm_torch.so"


def metadata_of(backend: str, identity: str) -> dict[str, object]:
    kind: dict[str, object] = {"type": backend}
    if backend == "cuda":
        first, *others = (f"{n[:-1]}.{n[-1]}" for n in re.findall(r"\d+", named_archs() or EVERY_ARCH))
        kind["archs"] = [f"{first}+PTX", *others]
    return {
        "id": identity,
        "name": "moegemm",
        "version": KERNEL_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": kind,
    }


def lay_out(backend: str, namespace: str, library: Path, out: Path) -> Path:
    """Writes the variant's folder, and the licences beside it; returns the folder."""
    machine = "cu130" if backend == "cuda" else "cpu"
    variant = out / "build" / f"torch-stable-abi{OLDEST_TORCH}-{machine}-x86_64-linux"
    shutil.rmtree(variant, ignore_errors=True)
    package = variant / "moegemm"
    package.mkdir(parents=True)
    copy_package(package, namespace)
    subprocess.run(["strip", "--strip-unneeded", library, "-o", package / library.name], check=True)
    (variant / "metadata.json").write_text(json.dumps(metadata_of(backend, namespace), indent=2) + "\n")
    for name in LICENCES:
        shutil.copy(ROOT / name, out)
    return variant


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["cpu", "cuda"])
    options, of_cmake = parser.parse_known_args()
    backend, namespace = options.backend, f"_moegemm_{options.backend}_{digest()}"
    library = build(backend, namespace, of_cmake)
    print(lay_out(backend, namespace, library, OUT).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
