"""Registers and shared memory of every sm80 kernel on architectures that the build has no machine code for.

    sm80_resources.py --nvcc=NVCC --ptxas=PTXAS --source=FOLDER [--archs=80,86,89,120] [--only=TEXT]

Each kernel of src/cuda/instances/sm80.inc but those for 9.0 alone is compiled to PTX once (bf16 for 16-bit kernels:
fp16 differs in the instructions' types only) and assembled for each architecture. Fails when a kernel spills registers,
or when an op has no kernel whose shared memory fits a block of some architecture.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import instances
from ptxas_check import faults_of, kernels_of

SOURCE = """#include "cuda/sm80/{family}_gemm/kernel.cuh"
namespace moegemm::cuda::sm80 {{
constexpr {type} kKernel = {{{fields}}};
template KernelFunctions {family}_gemm_functions<kKernel, DType::{dtype}>();
extern "C" __device__ const int shared_bytes = {layout}({experts});
}}
"""
LAYOUTS = {
    "row": "RowGemmLayout<ShapeOf<kKernel>>::total",
    "stream": "StreamLayout<StreamTraits<kKernel>>::rows",  # what a block has beside the rows that it holds
    "weight": "WeightGemmLayout<ShapeOf<kKernel>, kKernel.element_bytes()>::total",
}
SHARED_BYTES = re.compile(r"shared_bytes = (\d+);")
EXPERTS = 256
BLOCK_KIB = {"80": 163, "87": 163, "90": 227, "100": 227}  # a block's shared memory; 99 elsewhere


class Kernel:
    def __init__(self, line: instances.Kernel) -> None:
        self.line, named = line, line.named
        self.kind = (named["op"], named.get("math", "kTensor16"), named.get("loads", "kVectors"))
        if "quantised" in named:
            self.kind += ("kQuantised",)
        self.streams = line.family == "stream"
        if self.streams:
            self.kind = (named["op"], "kStream", named["weights"])
        sizes = ("warps", "stages") if self.streams else ("rows", "cols", "depth_bytes", "stages")
        self.tile = [named[name] for name in sizes]
        self.smem = 0  # known when it is compiled

    def __str__(self) -> str:
        return " ".join(word.removeprefix("k") for word in [*self.kind, *self.tile])

    def source(self) -> str:
        return SOURCE.format(
            family=self.line.family,
            type=self.line.type,
            fields=self.line.fields,
            layout=LAYOUTS[self.line.family],
            experts=EXPERTS,
            dtype=self.line.dtypes(["kBFloat16"])[0],
        )


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def examine(kernel: Kernel, nvcc: str, ptxas: str, source: Path, archs: list[str]) -> list[tuple[str, str, list[str]]]:
    """(architecture, registers, faults) of one kernel, for the architectures it is compiled for; sets its `smem`."""
    archs = [arch for arch in archs if int(arch) >= kernel.line.arch]
    with tempfile.TemporaryDirectory() as folder:
        code, ptx = Path(folder) / "kernel.cu", Path(folder) / "kernel.ptx"
        code.write_text(kernel.source())
        includes = [f"-I{source / 'src'}", f"-I{source / 'include'}"]
        flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-ptx", f"-arch=compute_{kernel.line.arch}"]
        run([nvcc, *flags, *includes, str(code), "-o", str(ptx)])
        kernel.smem = int(SHARED_BYTES.search(ptx.read_text())[1])
        found = []
        for arch in archs:
            report = run([ptxas, "-v", f"-arch=sm_{arch}", str(ptx), "-o", f"{folder}/{arch}.cubin"])
            (entry,) = kernels_of(report)
            found.append((arch, entry.get("registers", "?"), faults_of(report)))
        return found


def main(arguments: list[str]) -> int:
    options = dict(a.removeprefix("--").split("=", 1) for a in arguments)
    nvcc, ptxas, source = options["nvcc"], options["ptxas"], Path(options["source"])
    archs = options.get("archs", "80,86,89,120").split(",")
    lines = instances.kernels_of(source / "src/cuda/instances/sm80.inc")
    kernels = [kernel for kernel in map(Kernel, lines) if not kernel.line.exact]
    kernels = [kernel for kernel in kernels if options.get("only", "") in str(kernel)]
    failed = False
    print("registers on " + ", ".join(f"sm_{arch}" for arch in archs) + f"; shared memory with {EXPERTS} experts")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernel, found in zip(
            kernels, pool.map(lambda k: examine(k, nvcc, ptxas, source, archs), kernels), strict=True
        ):
            fits = [arch for arch, _, _ in found if kernel.smem <= BLOCK_KIB.get(arch, 99) * 1024]
            counts = {arch: count for arch, count, _ in found}
            registers = "  ".join(f"{counts.get(arch, '-'):>3}" for arch in archs)
            print(f"{registers}  {kernel.smem:>7} bytes, fits {','.join(fits)}  {kernel}", flush=True)
            for arch, _, faults in found:
                for fault in faults:
                    failed = True
                    print(f"  sm_{arch}: {fault}")
    for kind in {k.kind for k in kernels if not k.streams}:  # the others do what streams have no room for
        least = min(k.smem for k in kernels if k.kind == kind and k.line.arch == 80)
        for arch in archs:
            if least > BLOCK_KIB.get(arch, 99) * 1024:
                failed = True
                print(f"sm_{arch}: no {' '.join(kind)} kernel fits, the smallest takes {least} bytes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
