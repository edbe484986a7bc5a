"""Integers among an operation's arguments, some of which are sizes of the whole tensor.

`view(x, [batch, seq, 16, 64])` on a part with 8 of 16 heads must become `[batch, seq, 8, 64]`.
Trial runs find out which integers are sizes: `enumerate_edits` lists the trials, `divide_arguments`
applies one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Path = tuple[Any, ...]
Edit = tuple[Path, int]
"""(path of an integer in (args, kwargs), its divisor)."""


def enumerate_edits(template: Any, degree: int, grids: Sequence[int]) -> Iterator[tuple[Edit, ...]]:
    """Yield arguments to divide: none; one; all of one list; two; those of a grid of ranks.

    Args:
        grids: outer degrees of the grids to try.
    """
    yield ()
    found = [(path, n) for path, n in list_integers(template) if n > 1]
    even = [path for path, n in found if n % degree == 0]
    for path in even:
        yield ((path, degree),)
    for _, group in itertools.groupby(found, key=lambda item: item[0][:-1]):
        sizes = list(group)
        if len(sizes) > 1 and all(n % degree == 0 for _, n in sizes):
            yield tuple((path, degree) for path, _ in sizes)
    if len(even) <= 6:
        for one, other in itertools.combinations(even, 2):
            yield ((one, degree), (other, degree))
    for outer in grids:
        yield from _enumerate_grid_edits(found, outer, degree // outer)


def _enumerate_grid_edits(
    found: list[tuple[Path, int]], outer: int, inner: int
) -> Iterator[tuple[Edit, ...]]:
    able = [(path, k) for k in dict.fromkeys((outer, inner)) for path, n in found if n % k == 0]
    for single in able:
        yield (single,)
    for first, second in itertools.combinations(able, 2):
        if first[0] != second[0] and first[1] * second[1] == outer * inner:
            yield (first, second)


def list_integers(template: Any) -> list[tuple[Path, int]]:
    """Return the integers in nested lists and mappings, with their paths.

    >>> list_integers(([2, [3, True]], {"dim": 4}))
    [((0, 0), 2), ((0, 1, 0), 3), ((1, 'dim'), 4)]
    """
    found: list[tuple[Path, int]] = []

    def walk(value: Any, path: Path) -> None:
        if type(value) is int:
            found.append((path, value))
        elif isinstance(value, list | tuple):
            for k, item in enumerate(value):
                walk(item, (*path, k))
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, (*path, key))

    walk(template, ())
    return found


def divide_arguments(template: Any, wanted: Sequence[Edit]) -> Any:
    """Return a copy of the template with some integers divided.

    >>> divide_arguments(([2, [8, 4]], {}), [((0, 1, 0), 4)])
    [[2, [2, 4]], {}]
    """
    by_path = dict(wanted)

    def walk(value: Any, path: Path) -> Any:
        if path in by_path:
            return value // by_path[path]
        if isinstance(value, list | tuple):
            return [walk(item, (*path, k)) for k, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        return value

    return walk(template, ())


def replace_integers(template: Any, numbers: Mapping[int, int]) -> Any:
    """Return a copy of the template with some integers replaced.

    >>> replace_integers(([2, [8, 4, True]], {}), {8: 1})
    ([2, [1, 4, True]], {})
    """
    if type(template) is int:
        return numbers.get(template, template)
    if isinstance(template, list | tuple):
        return type(template)(replace_integers(item, numbers) for item in template)
    if isinstance(template, dict):
        return {key: replace_integers(item, numbers) for key, item in template.items()}
    return template


def as_float64(value: Any) -> Any:
    """Convert an argument for trial runs: the CPU as device, floating dtypes as float64."""
    if isinstance(value, torch.dtype):
        if value.is_complex:
            return torch.complex128
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value
