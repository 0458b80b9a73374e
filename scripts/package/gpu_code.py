#!/usr/bin/env python3
"""Lists the GPU code in a library, and fails where a GPU would have to compile some at its first call.

    scripts/package/gpu_code.py libmoegemm_torch.so --archs 80,86,89,90,100,120

A fat binary has an image for each architecture: machine code, or PTX, which the driver compiles. Those of --archs that
are not older than the oldest image must have machine code, and PTX must be there for what is newer than they are. Code
of one architecture alone (sm_90a: wgmma has no PTX that others could run) needs no other image.
"""

import argparse
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX = 1
EXACT = 1 << 20
COMPRESSED = (1 << 13) | (1 << 15)  # LZ4, Zstandard


class Image(NamedTuple):
    arch: int
    ptx: bool
    exact: bool
    stored_bytes: int
    bytes: int


def fat_binaries(data: bytes) -> Iterator[list[Image]]:
    """The images of each. Header: magic, version, header bytes, bytes of all images (8). Image: kind (2), version (2),
    header bytes (4), bytes with padding (8), bytes if compressed (4), ..., at 28 the architecture, at 40 flags, at 56
    the bytes when not compressed."""
    at = data.find(MAGIC)
    while at >= 0:
        begin = at + 16
        end = begin + struct.unpack_from("<Q", data, at + 8)[0]
        images = []
        while begin < end:
            kind, header, size = struct.unpack_from("<H2xIQ", data, begin)
            arch, flags, whole = struct.unpack_from("<I8xQ8xQ", data, begin + 28)
            images.append(Image(arch, kind == PTX, bool(flags & EXACT), size, whole if flags & COMPRESSED else size))
            begin += header + size
        yield images
        at = data.find(MAGIC, end)


def missing_code(images: list[Image], archs: list[int]) -> list[str]:
    """What a GPU of `archs`, or a newer one, would not find; nothing for code of one architecture alone."""
    machine = {image.arch for image in images if not image.ptx}
    if machine and all(image.exact for image in images):
        return []
    wanted = [arch for arch in archs if arch >= min(image.arch for image in images)]
    missing = [f"sm_{arch}" for arch in wanted if arch not in machine]
    return missing if any(image.ptx for image in images) else [*missing, "PTX"]


def libraries(path: Path) -> Iterator[bytes]:
    """The library, or those in a wheel."""
    if path.suffix != ".whl":
        yield path.read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.endswith(".so"):
                yield wheel.read(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, help="a library, an object or a wheel")
    parser.add_argument("--archs", required=True, help="compute capabilities, for instance 80,90")
    options = parser.parse_args()
    archs = sorted(int(arch.rstrip("a")) for arch in options.archs.replace(";", ",").split(","))
    found = [images for data in libraries(options.library) for images in fat_binaries(data)]
    if not found:
        sys.exit(f"{options.library} has no GPU code")
    counts: dict[str, int] = {}
    for image in sorted((i for images in found for i in images), key=lambda i: (i.ptx, i.arch, i.exact)):
        name = f"{'PTX' if image.ptx else 'sm'}_{image.arch}{'a' if image.exact else ''}"
        counts[name] = counts.get(name, 0) + 1
    stored, whole = (sum(getattr(i, f) for images in found for i in images) for f in ("stored_bytes", "bytes"))
    print(f"{len(found)} fat binaries, {stored / 1e6:.1f} MB, {whole / 1e6:.1f} MB when not compressed:")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    lacking = [missing for images in found if (missing := missing_code(images, archs))]
    for missing in lacking:
        print(f"a fat binary lacks {', '.join(missing)}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
