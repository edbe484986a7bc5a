"""Lets a script's `import NAME` of another library find a facade of it here.

What a facade lacks is imported all the same, and refused by its name where it is used: scripts and
other packages import much that they never call. Whether the library itself is installed is answered
as without us: other packages ask for it (`importlib.metadata` looks at files alone; `find_spec` is
asked here).
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
"""What each library's names are called in Shoal, where it has them in another way."""
_held: dict[str, Mapping[str, Any]] = {}
"""What each library's facade holds by name, whichever of its modules a script looks into."""
_find_spec = importlib.util.find_spec


def answer(
    name: str,
    facade: ModuleType,
    held: Mapping[str, Any],
    nearest: Mapping[str, str],
    inside: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Register a facade as the package `name`.

    Args:
        held: what any of its modules gives by name: libraries move names between them.
        nearest: for what is refused, by its last name: what to write in its place.
        inside: modules that are there before a script imports them, and what else each gives.

    Raises:
        ImportError: where the library itself was imported before.
    """
    known = sys.modules.get(name)
    if known is not None and known is not facade:
        raise ImportError(f"{name} was imported before shoal.neighbours.{name}; import that first")
    sys.modules[name] = facade
    facade.__dict__.setdefault("__path__", [])
    vars(facade)["__getattr__"] = _Asked(name)
    if not _ours:
        sys.meta_path.insert(0, _Finder())
    _ours[name], _held[name] = nearest, held
    for path, own in (inside or {}).items():
        module = importlib.import_module(f"{name}.{path}")
        vars(module).update(own)
    importlib.util.find_spec = _find_installed


class Lacking(ConfigError, AttributeError):
    """Something that a facade has not: one line for a user, none for `hasattr`."""

    def __init__(self, what: str, near: str | None) -> None:
        said = f"; try: {near}" if near else ": a run of Shoal has nothing of this name"
        super().__init__(f"{what} is not answered by Shoal{said}")


class _Asked:
    """A module's `__getattr__`: a name that it lacks is what is refused where it is used."""

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
        return Unanswered(name, (), {"path": f"{self.module}.{name}"})


class Unanswered(type):
    """The kind of what a facade lacks: a class that refuses to be called, asked and inherited."""

    path: str

    def __new__(cls, name: str, bases: tuple[type, ...], inside: dict[str, Any]) -> Any:
        """Make one; of a script's own class that inherits from one: refuse it."""
        for one in bases:
            if isinstance(one, cls):
                one.refuse()
        return super().__new__(cls, name, bases, inside)

    def __call__(cls, *_args: Any, **_named: Any) -> Any:
        """Refuse: it was called."""
        cls.refuse()

    def __iter__(cls) -> Any:
        """Refuse: its members were asked for."""
        cls.refuse()

    def __getattr__(cls, name: str) -> Any:
        """What a module of that name would give; else refuse: something of it was asked for."""
        if name.startswith("__"):
            raise AttributeError(name)
        held = _held[cls.path.partition(".")[0]]
        return held[name] if name in held else cls.refuse()

    def refuse(cls) -> NoReturn:
        """Say in one line what is not here, and what is. Errors: Lacking, always."""
        library, name = cls.path.partition(".")[0], cls.path.rpartition(".")[2]
        raise Lacking(cls.path, _ours[library].get(name))


class _Finder:
    """Finds the modules of a facade, all of them that a script asks for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The stand-in for a module of an answered library; None for others."""
        if "." in name and name.partition(".")[0] in _ours:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # both in one
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module that refuses what is used of it."""
        module = ModuleType(spec.name, "As Shoal answers it.")
        vars(module)["__getattr__"] = _Asked(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: `answer` fills in what is held."""


def _find_installed(name: str, package: str | None = None) -> ModuleSpec | None:
    """`importlib.util.find_spec`, which knows nothing of facades."""
    if name.partition(".")[0] in _ours:
        return importlib.machinery.PathFinder.find_spec(name)
    return _find_spec(name, package)
