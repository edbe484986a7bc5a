"""Opaque operations: a tracer asks composite operations to appear as one torch function.

Our models implement some operations in several steps because that is faster on one device
(attention in blocks of rows). Code that rewrites such an operation for several ranks needs it as
one. Inside `opaque_ops` the models call torch's own function instead; outside nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[bool] = ContextVar("whole operations", default=False)


@contextmanager
def opaque_ops() -> Iterator[None]:
    """Inside the `with`, make our models call torch's own function for composite operations.

    So a tracer sees attention in blocks of rows as one operation. It applies to this thread.
    """
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def opaque_ops_enabled() -> bool:
    """Return whether this thread is inside `opaque_ops`."""
    return _asked.get()
