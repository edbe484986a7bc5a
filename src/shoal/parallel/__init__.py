"""Techniques that turn a plain module into a program for many processes, and their order."""

from __future__ import annotations

from shoal.base.layouts.layout import Layout

ALONG_AXES = (
    # Experts are found by how whole parts of the model call each other.
    ("ep", "expert_parallel"),
    # Where stages end is seen on whole layers; what a stage holds of a layer is its part.
    ("pp", "pipeline"),
    ("tp", "tensor_parallel"),
    ("cp", "context_parallel"),
)
"""What divides a model along an axis, in the order in which it is planned: axis, technique."""


def modules_of(layout: Layout) -> tuple[str, ...]:
    """Name the modules that a layout's techniques are imported from, for who imports ahead.

    >>> modules_of(Layout(tp=2))
    ('shoal.parallel.tensor_parallel', 'shoal.parallel.exchange_rows')
    """
    found = [f"shoal.parallel.{name}" for axis, name in ALONG_AXES if getattr(layout, axis) > 1]
    return (*found, "shoal.parallel.exchange_rows") if found else ()
