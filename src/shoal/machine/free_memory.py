"""How much memory is free for what a process is about to make, and files that lie in it alone.

It is that of the machine, or less in a cgroup, as a container's is; pages of files count there as
used, though they could go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Limit and use, by the controller's name in cgroups of the second version and of the first."""


def free_bytes() -> int:
    """Find what is free for new processes here: of the machine, or less in this cgroup."""
    return min(free for _, free in _places())


def half_stays_free(size_bytes: int) -> bool:
    """Whether half of the memory is free beside so many bytes more: here, and in this cgroup."""
    return all(free - size_bytes >= most // 2 for most, free in _places())


def file_in_memory(name: str, size_bytes: int) -> int | None:
    """Make a file that lies on no disk, where half of the memory stays free beside it.

    A disk's file takes more than its pages: beside each of 4 KiB ext4 keeps a buffer head of 104
    bytes, 2.5 % of a model. And after half a minute the disk is given all of it, for nothing.

    name     to be read in /proc/PID/maps
    Gives    its descriptor; None where it is to lie on a disk
    Source   memfd_create(2); struct buffer_head, fs/buffer.c of Linux
    """
    if not hasattr(os, "memfd_create") or not half_stays_free(size_bytes):
        return None
    descriptor = -1
    try:
        descriptor = os.memfd_create(name)
        os.posix_fallocate(descriptor, 0, size_bytes)  # taken now: the next one asks what is left
    except OSError:
        if descriptor >= 0:
            os.close(descriptor)
        return None
    return descriptor


def _places() -> Iterator[tuple[int, int]]:
    """(bytes at most, bytes free) of the machine, and of each cgroup with a limit around us."""
    machine = psutil.virtual_memory()
    yield machine.total, machine.available
    try:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:
        return
    for _, kinds, own in lines:
        if kinds not in FILES:
            continue
        for path in (folder := Path(GROUPS, kinds, own.lstrip("/")), *folder.parents):
            try:
                most, used = (int((path / name).read_text()) for name in FILES[kinds])
            except (OSError, ValueError):  # "max", or above the root
                continue
            if most < machine.total:
                yield most, max(0, most - used)
