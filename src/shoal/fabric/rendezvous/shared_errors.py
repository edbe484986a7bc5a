"""Agreement of ranks on an error that each of them raises, so that one rank alone prints its text.

    every rank      adds 1 at a key of its error's text, and waits until all ranks have
    rank 0          prints the text, and says so at a second key
    other ranks     wait for that key: a launcher ends all ranks as soon as one has ended

An error of some ranks only does not reach the count, and each of them prints its own. Imported when
an error ends a program of several ranks.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from shoal.fabric._torch import clone_store_connection, get_default_store
from shoal.fabric.rendezvous.process_info import ProcessInfo, read_process_info

WAIT_S = 2.0
"""Seconds in which all ranks raise an error that they all raise: they made the same calls."""
PAUSE_S = 0.01
FAILURES = (RuntimeError, ValueError, NotImplementedError, dist.DistError)


def print_shared_error(text: str, world: tuple[int, int], show: Callable[[], None]) -> bool:
    """Print an error once if all ranks raise it; return whether rank 0 has printed it.

    Args:
        text: the error, the same on all ranks that raise it.
        world: rank and number of ranks.
        show: prints the text; called on rank 0 alone, if all ranks raise this error.

    Returns:
        False also without a store, or if no answer comes in time: print the error here then.
    """
    done: list[bool] = []
    # A store whose server has ended may keep a call for minutes.
    thread = threading.Thread(target=_run, args=(text, *world, show, done), daemon=True)
    thread.start()
    thread.join(3 * WAIT_S)
    return bool(done)


def read_ranks(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and number of ranks as a launcher gave them; (0, 1) without one."""
    with suppress(Exception):  # an environment that is none of a launcher's has its own error
        place = read_process_info(environ)
        return place.rank, place.size
    return 0, 1


def _run(text: str, rank: int, size: int, show: Callable[[], None], done: list[bool]) -> None:
    with suppress(*FAILURES):
        store = _open_store()
        key = f"errors/{zlib.crc32(text.encode()):x}"
        if store is None or not _count_to(store, key, size, add=1):
            return
        if rank == 0:
            show()
            done.append(True)
            store.add(f"{key}/printed", 1)
            _count_to(store, f"{key}/read", size - 1, add=0)  # this process may serve the store
            return
        if _count_to(store, f"{key}/printed", 1, add=0):
            done.append(True)
        store.add(f"{key}/read", 1)


def _open_store() -> dist.Store | None:
    """Return a connection to the ranks' store: of their group, or of torchrun's agent."""
    with suppress(*FAILURES):
        return dist.PrefixStore("shared", clone_store_connection(get_default_store()))
    place = read_process_info(os.environ)
    if not place.agent_store:
        return None
    return dist.PrefixStore(f"shared/{place.attempt}", _connect(place))


def _connect(place: ProcessInfo) -> dist.Store:
    limit = timedelta(seconds=WAIT_S)
    return dist.TCPStore(
        place.host, place.port, place.size, is_master=False, timeout=limit, wait_for_workers=False
    )


def _count_to(store: dist.Store, key: str, count: int, *, add: int) -> bool:
    """Add to a key, and wait until it has a value; return whether it came in time."""
    until_s, value = time.monotonic() + WAIT_S, store.add(key, add)
    while value < count and time.monotonic() < until_s:
        time.sleep(PAUSE_S)
        value = store.add(key, 0)
    return value >= count
