"""Does something once another package has been imported, without importing it."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it lets the other finders look, and adds a call to the end of the import."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_then(module: types.ModuleType) -> None:
                execute(module)
                self.then(module)

            loader.exec_module = execute_then
        return spec


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Calls `then` with the module of this name: now if it is there, else when somebody imports it."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Watcher) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(name, then))
