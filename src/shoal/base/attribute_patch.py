"""Replace attributes of modules and classes while a context is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class, and restore it at the end."""
    was_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
