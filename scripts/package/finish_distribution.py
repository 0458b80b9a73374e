#!/usr/bin/env python3
"""Makes the description of a wheel or sdist readable on a package index, and names its variant.

README's links are relative to the repository. A package index shows the text elsewhere: there they lead to the
`Repository` of `[project.urls]` in pyproject.toml or, while there is none, become plain text.

finish_distribution.py [--local cpu] DISTRIBUTION...    # --local: a wheel's version becomes 0.1.0+cpu
"""

import argparse
import base64
import gzip
import hashlib
import io
import re
import sys
import tarfile
import zipfile
from pathlib import Path

# Code comes first where it begins first: W[0](...) in it is no link, but a link's text may be code.
LINK = re.compile(r"```.*?```|(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^()\s]+)\)|`[^`\n]*`", re.DOTALL)
OUTSIDE = re.compile(r"[a-z]+:|#")


def readable(description: str, repository: str) -> str:
    """Relative links lead to the repository, or are text."""

    def replaced(found: re.Match[str]) -> str:
        if found["target"] is None or OUTSIDE.match(found["target"]):
            return found[0]
        if not repository:
            return "" if found["picture"] else found["text"]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['text']}]({repository.rstrip('/')}/{kind}/main/{found['target']})"

    return LINK.sub(replaced, description)


def finished_metadata(metadata: str, local: str) -> str:
    head, _, description = metadata.partition("\n\n")
    if local:
        head = re.sub(r"^Version: ([^+\n]+).*$", rf"Version: \1+{local}", head, count=1, flags=re.MULTILINE)
    url = re.search(r"^Project-URL: Repository, (\S+)$", head, re.MULTILINE)
    return f"{head}\n\n{readable(description, url[1] if url else '')}"


def record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}"


def finish_wheel(path: Path, local: str) -> Path:
    """Rewrites the wheel; with `local` under a new name."""
    distribution, version, *tags = path.stem.split("-")
    new_version = f"{version.partition('+')[0]}+{local}" if local else version
    old_info, new_info = (f"{distribution}-{v}.dist-info/" for v in (version, new_version))
    target = path.with_name("-".join([distribution, new_version, *tags]) + ".whl")
    lines: list[str] = []
    whole = io.BytesIO()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for item in source.infolist():
            data = source.read(item)
            name = item.filename.replace(old_info, new_info)
            if name == f"{new_info}RECORD" or item.is_dir():
                continue
            if name == f"{new_info}METADATA":
                data = finished_metadata(data.decode(), local).encode()
            item.filename, item.compress_type = name, zipfile.ZIP_DEFLATED
            out.writestr(item, data)
            lines.append(record_line(name, data))
        out.writestr(f"{new_info}RECORD", "\n".join([*lines, f"{new_info}RECORD,,", ""]))
    path.unlink()
    target.write_bytes(whole.getvalue())
    return target


def finish_sdist(path: Path) -> Path:
    whole = io.BytesIO()
    with tarfile.open(path) as source, tarfile.open(fileobj=whole, mode="w") as out:
        for member in source.getmembers():
            file = source.extractfile(member) if member.isfile() else None
            data = file.read() if file else b""
            if re.fullmatch(r"[^/]+/PKG-INFO", member.name):
                data = finished_metadata(data.decode(), "").encode()
                member.size = len(data)
            out.addfile(member, io.BytesIO(data) if file else None)
    path.write_bytes(gzip.compress(whole.getvalue(), mtime=0))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", default="", help="the local part of a wheel's version, for instance cpu")
    parser.add_argument("distributions", nargs="+", type=Path, metavar="DISTRIBUTION")
    options = parser.parse_args()
    for path in options.distributions:
        print(finish_wheel(path, options.local) if path.suffix == ".whl" else finish_sdist(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
