"""A word between who traces a layer and who wrote it: show operations as one, not as their steps.

Crafts write some operations as several because that is faster on one device (attention in blocks of
rows). Who rewrites the operation for several ranks wants to see it as the one that it is. Inside of
`shown_whole` a craft calls torch's own function instead; outside nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_asked: ContextVar[bool] = ContextVar("whole operations", default=False)


@contextmanager
def shown_whole() -> Iterator[None]:
    """Inside, operations that a craft takes apart for speed are called as one."""
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def asked_whole() -> bool:
    """Whether operations are to be called as one now."""
    return _asked.get()
