"""Serve a script's `import NAME` of another library with a facade of it.

A name that the facade lacks can be imported all the same, and is refused where it is used: scripts
and other packages import much that they never call. Queries for the library itself are answered as
without Shoal: other packages ask whether it is installed (`importlib.metadata` looks at files
alone; `find_spec` is wrapped here).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from shoal.base.errors import ConfigError

_ours: dict[str, Mapping[str, str]] = {}
"""Library → refused name → the replacement in Shoal."""
_held: dict[str, Mapping[str, Any]] = {}
"""Library → objects of its facade by name, in whichever module a script looks."""
_find_spec = importlib.util.find_spec


def register_facade(
    name: str,
    facade: ModuleType,
    held: Mapping[str, Any],
    nearest: Mapping[str, str],
    inside: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Register a facade as the package `name`.

    Args:
        held: objects that any of its modules returns by name: libraries move names between them.
        nearest: last name of a refused object → the replacement to suggest.
        inside: modules that exist before a script imports them, and further objects of each.

    Raises:
        ImportError: the library itself was imported before.
    """
    known = sys.modules.get(name)
    if known is not None and known is not facade:
        raise ImportError(f"{name} was imported before shoal.neighbours.{name}; import that first")
    sys.modules[name] = facade
    facade.__dict__.setdefault("__path__", [])
    vars(facade)["__getattr__"] = _MissingNameGetter(name)
    if not _ours:
        sys.meta_path.insert(0, _FacadeFinder())
    _ours[name], _held[name] = nearest, held
    for path, own in (inside or {}).items():
        module = importlib.import_module(f"{name}.{path}")
        vars(module).update(own)
    importlib.util.find_spec = _find_installed


class MissingNameError(ConfigError, AttributeError):
    """Error for a name that a facade lacks: one line for a user, and False for `hasattr`."""

    def __init__(self, what: str, near: str | None) -> None:
        said = f"; try: {near}" if near else ": a run of Shoal has nothing of this name"
        super().__init__(f"{what} is not answered by Shoal{said}")


class _MissingNameGetter:
    """A module's `__getattr__`: returns an `MissingName` class for a name that it lacks."""

    def __init__(self, module: str) -> None:
        self.module = module

    def __call__(self, name: str) -> Any:
        held = _held[self.module.partition(".")[0]]
        if name in held:
            return held[name]
        known = re.fullmatch("is_(.+)_available", name)
        if known is not None:
            found = importlib.util.find_spec(known[1]) is not None
            return lambda *_args, **_named: found
        if name.startswith(("__", "pytest")):  # what importers and collectors of tests ask for
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
        return MissingName(name, (), {"path": f"{self.module}.{name}"})


class MissingName(type):
    """Metaclass of missing names: a class that refuses calls, attributes and inheritance."""

    path: str

    def __new__(cls, name: str, bases: tuple[type, ...], inside: dict[str, Any]) -> Any:
        """Make a missing name's class; refuse a script's own class that inherits from one."""
        for one in bases:
            if isinstance(one, cls):
                one.refuse()
        return super().__new__(cls, name, bases, inside)

    def __call__(cls, *_args: Any, **_named: Any) -> Any:
        """Refuse a call."""
        cls.refuse()

    def __iter__(cls) -> Any:
        """Refuse an iteration."""
        cls.refuse()

    def __getattr__(cls, name: str) -> Any:
        """Return the attribute of a module of that name; else refuse the access."""
        if name.startswith("__"):
            raise AttributeError(name)
        held = _held[cls.path.partition(".")[0]]
        return held[name] if name in held else cls.refuse()

    def refuse(cls) -> NoReturn:
        """Raise one line on the missing name and the nearest one.

        Raises:
            Lacking: always.
        """
        library, name = cls.path.partition(".")[0], cls.path.rpartition(".")[2]
        raise MissingNameError(cls.path, _ours[library].get(name))


class _FacadeFinder:
    """Import finder for all modules of a facade."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a facade's module; None for other libraries."""
        if "." in name and name.partition(".")[0] in _ours:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # both in one
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module that refuses the names it lacks."""
        module = ModuleType(spec.name, "As Shoal answers it.")
        vars(module)["__getattr__"] = _MissingNameGetter(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `register_facade` fills in the module's objects."""


def _find_installed(name: str, package: str | None = None) -> ModuleSpec | None:
    """Call `importlib.util.find_spec` without the facades."""
    if name.partition(".")[0] in _ours:
        return importlib.machinery.PathFinder.find_spec(name)
    return _find_spec(name, package)
