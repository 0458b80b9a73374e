#!/usr/bin/env python3
"""Writes stand-ins for this system's C and C++ libraries that end at a given release of glibc.

A library that is linked against them runs on every system from that release on, although this one is newer: each symbol
is bound to the newest version that the old release has, and what it has not is a link error instead of a surprise.
Stand-ins have names and versions, no code; at run time the system's own libraries are loaded.

old_runtime.py --glibc 2.28 --compiler c++ --out FOLDER
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

# What the distributions with that glibc ship, as the manylinux policies have it.
LIBSTDCXX_OF = {"2.28": {"GLIBCXX": "3.4.24", "CXXABI": "1.3.11", "GCC": "7.0.0"}}
LIBRARIES = ("libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2")
# Part of libc.so.6 since 2.34. Older systems find what moved there through these.
ONCE_APART = ("libpthread.so.0", "libdl.so.2", "librt.so.1")
SECTIONS = {"FUNC": ".text", "IFUNC": ".text", "OBJECT": ".data", "TLS": ".tdata"}
SYMBOL = re.compile(
    r"\s*\d+: [0-9a-f]+ +(?P<size>\d+|0x[0-9a-f]+) (?P<type>\w+) +(?:GLOBAL|WEAK|UNIQUE) +DEFAULT +\w+ "
    r"(?P<name>[^@\s]+)@@?(?P<version>[A-Z]+_[0-9.]+)$"
)


class Symbol(NamedTuple):
    version: str
    type: str
    size: int


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("_")[1].split(".")))


def symbols_of(library: Path, newest: dict[str, str]) -> dict[str, Symbol]:
    """Every exported name in the newest version that is old enough."""
    listing = subprocess.run(
        ["readelf", "--dyn-syms", "-W", library], capture_output=True, text=True, check=True
    ).stdout
    limits = {family: number(f"{family}_{version}") for family, version in newest.items()}
    found: dict[str, Symbol] = {}
    for line in listing.splitlines():
        match = SYMBOL.match(line)
        if not match or " UND " in line or match["type"] not in SECTIONS:
            continue
        symbol = Symbol(match["version"], match["type"], int(match["size"], 0))
        limit = limits.get(symbol.version.split("_")[0])
        name = match["name"]
        if (
            limit
            and number(symbol.version) <= limit
            and (name not in found or number(found[name].version) < number(symbol.version))
        ):
            found[name] = symbol
    return found


def write_standin(soname: str, symbols: dict[str, Symbol], compiler: str, out: Path) -> None:
    code, versions = [], defaultdict(list)
    for name, symbol in sorted(symbols.items()):
        kind = {"OBJECT": "@object", "TLS": "@tls_object"}.get(symbol.type, "@function")
        flags = ',"awT",@progbits' if symbol.type == "TLS" else ""
        code.append(f".section {SECTIONS[symbol.type]}{flags}\n.globl {name}\n.type {name},{kind}\n{name}: .skip 1\n")
        code.append(f".size {name},{max(symbol.size, 1)}\n")
        versions[symbol.version].append(name)
    script = "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in sorted(versions.items()))
    (out / f"{soname}.s").write_text('.section .note.GNU-stack,"",@progbits\n' + "".join(code))
    (out / f"{soname}.versions").write_text(script)
    command = [compiler, "-shared", "-nostdlib", "-x", "assembler", out / f"{soname}.s", "-o", out / soname]
    command += [f"-Wl,-soname,{soname}"]
    if versions:
        command.append(f"-Wl,--version-script={out / f'{soname}.versions'}")
    subprocess.run(command, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glibc", required=True, choices=sorted(LIBSTDCXX_OF))
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    newest = {"GLIBC": options.glibc, **LIBSTDCXX_OF[options.glibc]}
    for soname in LIBRARIES:
        asked = [options.compiler, f"-print-file-name={soname}"]
        library = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        if not library.is_absolute():
            print(f"{options.compiler} does not find {soname}", file=sys.stderr)
            return 1
        write_standin(soname, symbols_of(library, newest), options.compiler, options.out)
    for soname in ONCE_APART:
        write_standin(soname, {}, options.compiler, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
