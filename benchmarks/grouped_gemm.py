#!/usr/bin/env python3
"""moegemm-bench from a checkout: `--help` explains; each record goes to its folder in build/bench."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

try:
    from moegemm.bench.cli import main
except ModuleNotFoundError:  # an installed package comes first
    sys.path.insert(0, str(ROOT / "python"))
    from moegemm.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(records=ROOT / "build" / "bench"))
