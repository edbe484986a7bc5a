"""Rows of a matrix for `pytest.mark.parametrize`: some for `make test`, all of them for `make proof`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def rows(axes: Sequence[Sequence[Any]], kept: Collection[tuple[Any, ...]]) -> list[Any]:
    """Make every combination of the axes' values a row; those that are not `kept` are proof's.

    >>> [len(row.marks) for row in rows([(2, 4), ("a", "b")], kept=[(2, "a"), (4, "b")])]
    [0, 1, 1, 0]
    """
    return chosen(list(itertools.product(*axes)), kept)


def chosen(table: Sequence[tuple[Any, ...]], kept: Collection[tuple[Any, ...]]) -> list[Any]:
    """Make every row of a table one for pytest; those that do not begin as one of `kept` are proof's.

    >>> [len(row.marks) for row in chosen([("a", 1), ("b", 2)], kept=[("b",)])]
    [1, 0]
    """
    found = [any(row[: len(one)] == one for one in kept) for row in table]
    unknown = [one for one in kept if not any(row[: len(one)] == one for row in table)]
    assert not unknown, f"no such rows: {unknown}"
    return [
        pytest.param(*row, marks=[] if short else [pytest.mark.proof])
        for row, short in zip(table, found, strict=True)
    ]
