"""Module paths of releases before 0.2: in a run.toml, and in imports of other packages.

`moved_modules.txt` has a line for each module that moved: its old path, its new one. Aliases stay
for one release.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc takes 20 ms of every `import shoal`


@functools.cache
def _moves() -> dict[str, str]:
    with open(__file__.removesuffix(".py") + ".txt", encoding="utf-8") as table:
        return dict(line.split() for line in table)


def current_path(module: str) -> str:
    """Return the current path of a module, given its path in any release.

    >>> current_path("shoal.data.shards"), current_path("torch.nn")
    ('shoal.data.streams.webdataset', 'torch.nn')
    """
    return _moves().get(module, module) if module.startswith("shoal.") else module


class _Alias(Loader):
    """Loader of a moved module under its old path: the same object, with a deprecation line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        import warnings  # not for every `import shoal`

        warnings.warn(
            f"{spec.name} is {self.path} since 0.2; the old path goes in 0.3",
            DeprecationWarning,
            stacklevel=2,
        )
        module = importlib.import_module(self.path)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has put the alias's there


class _MovedModuleFinder:
    """Finder of moved modules, for import paths without a module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        moved = current_path(name)
        return None if moved == name else ModuleSpec(name, _Alias(moved))


def install_import_aliases() -> None:
    """Install the finder of old module paths, last on sys.meta_path."""
    if not any(isinstance(finder, _MovedModuleFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModuleFinder())
