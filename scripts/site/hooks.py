"""What MkDocs does besides rendering docs/: pages that live elsewhere in the repository become part of the site, the
API references are written, and links that lead from one place to another keep leading there."""

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import cpp_reference
import python_reference

ROOT = Path(__file__).resolve().parents[2]
WARNINGS = logging.getLogger("mkdocs.hooks.moegemm")  # a strict build fails at each
# Path in the repository, and in the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/method.md",
}
SOURCES = {
    "examples/train_moe.py": "examples/train_moe.md",
    "examples/train_expert_parallel.py": "examples/train_expert_parallel.md",
    "examples/finetune_moe.py": "examples/finetune_moe.md",
    "examples/finetune_lora.py": "examples/finetune_lora.md",
    "examples/finetune_quantized.py": "examples/finetune_quantized.md",
    "examples/generate_moe.py": "examples/generate_moe.md",
    "examples/cpp/moe_layer.cpp": "examples/moe_layer_cpp.md",
    "LICENSE": "license.md",
}
REFERENCES = {"reference/cpp.md": cpp_reference.to_markdown, "reference/python.md": python_reference.to_markdown}
LANGUAGES = {".py": "python", ".cpp": "cpp"}
LINK = re.compile(r"(\]\()([^()\s]+)(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
BEGINS_LIST_OR_TABLE = re.compile(r"(- |\d+\. |\|)")
BY_SITE = {site: place for place, site in (PAGES | SOURCES).items()}


def source_page(place: str) -> str:
    """A file of code as a page."""
    path = ROOT / place
    return f"# {place}\n\n```{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def on_files(files: Any, config: Any) -> Any:
    contents = {site: (ROOT / place).read_text() for place, site in PAGES.items()}
    contents |= {site: source_page(place) for place, site in SOURCES.items()}
    contents |= {site: write() for site, write in REFERENCES.items()}
    for site, text in contents.items():
        files.append(File.generated(config, site, content=text))
    return files


def site_place(place: str) -> str | None:
    """Where the site has a file of the repository; None: nowhere."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    if place.startswith("include/moegemm"):
        return "reference/cpp.md"
    return (PAGES | SOURCES).get(place)


def moved_link(link: str, page: str) -> str:
    """The link of a page, which was written for the page's place in the repository, for its place in the site."""
    if re.match(r"[a-z]+:|#", link) or page in REFERENCES:
        return link
    path, hash_mark, anchor = link.partition("#")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(BY_SITE.get(page, f"docs/{page}")), path))
    target = site_place(place)
    if target is None:
        WARNINGS.warning("%s links to %s, which is no page of the site", page, link)
        return link
    return posixpath.relpath(target, posixpath.dirname(page) or ".") + hash_mark + anchor


def as_python_markdown(text: str) -> str:
    """What GitHub takes and Python-Markdown does not: a list or table right after a line of text, and lists in lists
    that are indented by two."""
    lines: list[str] = []
    for line in text.split("\n"):
        if BEGINS_LIST_OR_TABLE.match(line) and lines and lines[-1].strip():
            same = BEGINS_LIST_OR_TABLE.match(lines[-1].lstrip())
            if not same and not lines[-1].startswith("  "):
                lines.append("")
        lines.append("  " + line if re.match(r"  - ", line) else line)
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    name = page.file.src_uri
    parts = FENCE.split(markdown)  # every second one is code
    for i in range(0, len(parts), 2):
        moved = LINK.sub(lambda found: found[1] + moved_link(found[2], name) + found[3], parts[i])
        parts[i] = as_python_markdown(moved)
    return "".join(parts)
