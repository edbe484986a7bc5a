"""Each argument of the public classes is documented under `Args:`; griffe-style, by signature.

ruff's D417 is off: it wants a section for private functions too.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import shoal
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.fabric import World
from shoal.trainer.run import Run

CLASSES = (Run, Plan, Layout, World)


def documented(text: str) -> set[str]:
    """The names of the sections `Args:` and `Attributes:`, several in a line among them."""
    found: set[str] = set()
    for section in re.findall(r"^(?:Args|Attributes):\n((?:(?:    .*)?\n)+)", text + "\n", re.M):
        for line in re.findall(r"^    ([\w*, ]+):", section, re.M):
            found |= {name.strip("* ") for name in line.split(",")}
    return found


def missing(function: Callable[..., Any]) -> set[str]:
    """The parameters of a function that its docstring says nothing of."""
    names = set(inspect.signature(function).parameters) - {"self", "unknown", "cls"}
    return names - documented(inspect.getdoc(function) or "")


def public_methods() -> list[tuple[str, Callable[..., Any]]]:
    """Of each class, what it defines itself without an underscore."""
    found = []
    for kind in CLASSES:
        for name, one in vars(kind).items():
            function = getattr(one, "__func__", one)
            if not name.startswith("_") and inspect.isfunction(function):
                found.append((f"{kind.__name__}.{name}", function))
    return found


@pytest.mark.parametrize(
    ("name", "function"), [("parallelize", shoal.parallelize), *public_methods()]
)
def test_every_argument_is_documented(name: str, function: Callable[..., Any]) -> None:
    assert not missing(function), f"{name}: {sorted(missing(function))} not under Args:"


@pytest.mark.parametrize("kind", [one for one in CLASSES if dataclasses.is_dataclass(one)])
def test_every_field_is_documented(kind: type) -> None:
    own = {f.name for f in dataclasses.fields(kind) if f.name in kind.__annotations__}  # type: ignore[arg-type]
    assert not own - documented(inspect.getdoc(kind) or "")


def test_a_missing_argument_is_seen() -> None:
    def function(first: int, second: int) -> None:
        """Do something.

        Args:
            first: a number.

        Returns:
            second: nothing.
        """

    assert missing(function) == {"second"}
