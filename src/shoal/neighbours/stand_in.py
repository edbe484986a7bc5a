"""Lets a script's `import NAME` of another library find a facade of it here.

Whether that library is installed is answered as without us: other packages ask for it, and would
load their own code for it (`importlib.metadata` looks at files alone; `find_spec` is asked here).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ours: set[str] = set()
_find_spec = importlib.util.find_spec


def answer(name: str, facade: ModuleType, inside: Mapping[str, Mapping[str, Any]]) -> None:
    """Register a facade as the package `name`, and what its modules hold by dotted name.

    Errors   ImportError where the library itself was imported before
    """
    known = sys.modules.get(name)
    if known is not None and known is not facade:
        raise ImportError(f"{name} was imported before shoal.neighbours.{name}; import that first")
    sys.modules[name] = facade
    facade.__dict__.setdefault("__path__", [])
    _ours.add(name)
    for path, held in inside.items():
        parent = facade
        for end in [place for place, letter in enumerate(f"{path}.") if letter == "."]:
            full = f"{name}.{path[:end]}"
            module = sys.modules.get(full)
            if module is None:
                module = sys.modules[full] = ModuleType(full, f"Of {name}, as Shoal answers it.")
                module.__path__ = []
            setattr(parent, full.rpartition(".")[2], module)
            parent = module
        vars(parent).update(held)
    importlib.util.find_spec = _find_installed


def _find_installed(name: str, package: str | None = None) -> ModuleSpec | None:
    """`importlib.util.find_spec`, which knows nothing of facades."""
    if name.partition(".")[0] in _ours:
        return importlib.machinery.PathFinder.find_spec(name)
    return _find_spec(name, package)
