"""Switch one guard off in a test's processes: `SHOAL_TEST_WITHOUT=ExternalWriteGuard`.

By its class's name, for `tests/proof/guards.py`, which looks what tests then say.
"""

from __future__ import annotations

import importlib
import os
import pkgutil

VARIABLE = "SHOAL_TEST_WITHOUT"


def guard_classes() -> dict[str, type]:
    """Return all guards by name: those of the table, and those that are added where needed."""
    import shoal.trainer.guards as table
    from shoal.trainer.guards.guard import Guard

    for one in pkgutil.iter_modules(table.__path__, f"{table.__name__}."):
        importlib.import_module(one.name)
    importlib.import_module("shoal.trainer.state.replaced_folder")
    found = {one.__name__: one for one in Guard.__subclasses__()}
    return {name: one for name, one in found.items() if one.__module__.startswith("shoal.")}


def switch_off() -> None:
    """Let the guard that the variable names do nothing at any place of a step."""
    name = os.environ.get(VARIABLE)
    if not name:
        return
    from shoal.trainer.guards.guard import Guard

    places = ("before", "around", "sums", "invariants", "agree", "between", "updating", "updated")
    guard = guard_classes()[name]
    for place in places:
        if place == "sums":  # another guard may read an entry
            continue
        setattr(guard, place, getattr(Guard, place))
