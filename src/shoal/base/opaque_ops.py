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
    """Show operations as one: inside the `with`, our models call torch's own function for them.

    So attention that is computed in blocks of rows shows as one operation to who traces it. It
    holds for this thread.
    """
    token = _asked.set(True)
    try:
        yield
    finally:
        _asked.reset(token)


def asked_whole() -> bool:
    """Tell whether this thread is inside `shown_whole`, so that operations are called as one."""
    return _asked.get()
