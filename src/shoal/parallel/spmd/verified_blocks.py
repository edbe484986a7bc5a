"""Record of the blocks that passed their check in this start, so that none is checked twice.

A start that proves its layout builds the model twice: once in float64, as the proof trains it, and
once as the run uses it. Both builds are traced and labelled anew. A split whose program equals one
that passed, except for the dtype, is not checked again. Outside of `skip_verified_blocks`, in a
user's own loop, nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PASSED: ContextVar[set[object] | None] = ContextVar("passed", default=None)
"""Programs that passed, by the keys of `block_check.known_by`; None outside of a start."""


@contextmanager
def skip_verified_blocks() -> Iterator[None]:
    """Open a start, in which a block that passed is not checked a second time."""
    before = PASSED.set(set())
    try:
        yield
    finally:
        PASSED.reset(before)
