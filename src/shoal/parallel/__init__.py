"""Techniques that turn a plain module into a program for many processes, and their order."""

from __future__ import annotations

from shoal.base.layouts.layout import Layout

ALONG_AXES = (
    # ep first: experts are found by how whole submodules call each other.
    ("ep", "expert_parallel"),
    # pp before tp: stage boundaries are found on whole layers; a stage holds its tp part of each.
    ("pp", "pipeline"),
    ("tp", "tensor_parallel"),
    ("cp", "context_parallel"),
)
"""(axis, technique module) of each axis that divides a model, in planning order."""


def list_technique_modules(layout: Layout) -> tuple[str, ...]:
    """Return the names of the modules that implement a layout's techniques, for early import.

    >>> list_technique_modules(Layout(tp=2))
    ('shoal.parallel.tensor_parallel', 'shoal.parallel.exchange_rows')
    """
    found = [f"shoal.parallel.{name}" for axis, name in ALONG_AXES if getattr(layout, axis) > 1]
    return (*found, "shoal.parallel.exchange_rows") if found else ()
