"""Programs of the repository as modules."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def load_program(place: str) -> ModuleType:
    """Of a file, by its path in the repository."""
    path = ROOT / place
    loader = SourceFileLoader(path.stem, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.stem, loader))
    sys.modules[path.stem] = module  # where dataclasses look for it
    loader.exec_module(module)
    return module
