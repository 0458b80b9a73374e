"""Runs one CUDA compilation and fails it when ptxas reports what we do not ship.

    ptxas_check.py --summary=FILE -- [launcher...] nvcc ... -c source.cu -o object.o

Used as a compiler launcher, outermost, so that a cached compilation (ccache replays the compiler's
messages) is checked like a fresh one. Refused, for every kernel of the source:
  * register spills: the kernel would run, slowly and unnoticed;
  * wgmma that ptxas serialises, and setmaxnreg that it ignores (C7508, C7510 to C7520).
What ptxas said is kept beside the object in object.o.ptxas.txt; registers, stack and static shared
memory of all kernels of the build are collected in the summary file.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REFUSED_MESSAGE = re.compile(r"\bC75(08|1[0-9]|20)\b|wgmma.*serializ", re.IGNORECASE)
ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
USED = re.compile(r"Used (?P<registers>\d+) registers")
STATIC_SMEM = re.compile(r"(?P<smem>\d+) bytes smem")
# Lines that -Xptxas=-v adds to every good compilation.
CHATTER = re.compile(r"^\s*(ptxas info\s*:|\d+ bytes stack frame)")


def kernels_of(report: str) -> list[dict[str, str]]:
    """One entry for each compiled kernel, in ptxas' order."""
    kernels: list[dict[str, str]] = []
    for line in report.splitlines():
        if entry := ENTRY.search(line):
            kernels.append(entry.groupdict())
        elif kernels:
            # The first match after an entry is the entry's own; later ones are device functions'.
            for pattern in (STACK, USED, STATIC_SMEM):
                if match := pattern.search(line):
                    for key, value in match.groupdict().items():
                        kernels[-1].setdefault(key, value)
    return kernels


def faults_of(report: str) -> list[str]:
    faults = []
    for line in report.splitlines():
        spill = STACK.search(line)
        if spill and (int(spill["stores"]) or int(spill["loads"])):
            faults.append(f"register spills: {line.strip()}")
        elif REFUSED_MESSAGE.search(line):
            faults.append(line.strip())
    return faults


def demangle(names: list[str]) -> list[str]:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return names
    result = subprocess.run([tool], input="\n".join(names), capture_output=True, check=False, text=True)
    demangled = result.stdout.splitlines()
    return demangled if len(demangled) == len(names) else names


def write_summary(summary: Path) -> None:
    """Rewrites the table of every kernel below the summary's folder."""
    summary.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{summary}.lock", "w") as lock:  # compilations run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = []
        for path in sorted(summary.parent.rglob("*.ptxas.txt")):
            if not Path(str(path).removesuffix(".ptxas.txt")).exists():
                continue
            kernels = kernels_of(path.read_text())
            for kernel, name in zip(kernels, demangle([k["name"] for k in kernels]), strict=True):
                rows.append((path.name.removesuffix(".o.ptxas.txt"), kernel, name))
        lines = ["registers  static_smem  stack  arch    source  kernel"]
        for source, kernel, name in rows:
            lines.append(
                f"{kernel.get('registers', '?'):>9}  {kernel.get('smem', '0'):>11}  "
                f"{kernel.get('stack', '0'):>5}  {kernel['arch']:<6}  {source}  {name}"
            )
        partial = Path(f"{summary}.partial")
        partial.write_text("\n".join(lines) + "\n")
        os.replace(partial, summary)


def main(arguments: list[str]) -> int:
    if "--" not in arguments:
        sys.exit(__doc__)
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    summary = next((Path(o.split("=", 1)[1]) for o in options if o.startswith("--summary=")), None)
    target = Path(command[command.index("-o") + 1]) if "-o" in command else None

    result = subprocess.run(command, capture_output=True, check=False, text=True)
    output = result.stderr + result.stdout  # nvcc passes ptxas' messages through either
    if result.returncode != 0 or target is None or "-Xptxas=-v" not in command:
        sys.stderr.write(output)
        return result.returncode

    sys.stderr.writelines(line for line in output.splitlines(keepends=True) if not CHATTER.match(line))
    report = Path(f"{target}.ptxas.txt")
    report.write_text(output)
    faults = faults_of(output)
    if faults:
        for fault in faults:
            print(f"{target}: refused by ptxas_check.py: {fault}", file=sys.stderr)
        print(f"{target}: all that ptxas said is in {report.absolute()}", file=sys.stderr)
        target.unlink(missing_ok=True)
        return 1
    if summary:
        write_summary(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
