"""The store that processes met at, for words on the side while their collectives stand still."""

from __future__ import annotations

import torch.distributed as dist

from shoal.fabric._torch import default_store, own_connection


def meeting_store() -> dist.Store | None:
    """The process group's own store over a connection of its own; None where there is none.

    A thread that asks must not wait behind the main one, which may stand in the store for hours.
    """
    if not dist.is_initialized():
        return None
    try:
        return dist.PrefixStore("meeting", own_connection(default_store()))
    except (RuntimeError, NotImplementedError, dist.DistError):
        return None
