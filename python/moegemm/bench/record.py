"""What the scripts that write a record of their own have in common."""

import argparse
import json
from pathlib import Path
from typing import Any


def add_record_options(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Where the record goes, by default to `folder`, and what it says of itself."""
    parser.add_argument("--heat", type=float, default=2.0, help="seconds of matrix products first, on a GPU")
    parser.add_argument("--out", type=Path, default=folder, help="folder of the record")
    parser.add_argument("--commit", default=None, help="what to record as the commit, where there is no repository")
    parser.add_argument("--render", type=Path, help="write page and pictures of this record instead of measuring")


def write_json(record: dict[str, Any], folder: Path, stem: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
