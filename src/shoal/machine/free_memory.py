"""How much memory is free for what a process is about to make, and files that lie in it alone.

It is that of the machine, or less in a cgroup, as a container's is; pages of files count there as
used, though they could go.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from shoal.base.errors import ConfigError
from shoal.base.text.units import bytes_text

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Limit and use, by the controller's name in cgroups of the second version and of the first."""

SPARE = 2
"""What stays free, in parts of what files in memory take."""


def free_bytes() -> int:
    """Find what is free for new processes here: of the machine, or less in this cgroup."""
    return min(_free())


def file_in_memory(name: str, size_bytes: int, taken_bytes: int) -> int | None:
    """Make a file that lies on no disk, where twice as much stays free as such files take.

    That is room for what is made of them: they cannot be written out.
    A disk's file takes more than its pages: beside each of 4 KiB ext4 keeps a buffer head of 104
    bytes, 2.5 % of a model. And after half a minute the disk is given all of it, for nothing.

    Args:
        name: to be read in /proc/PID/maps.
        taken_bytes: by files that were made so before, and are open still.

    Returns:
        its descriptor; None where it is to lie on a disk.

    References:
        memfd_create(2); struct buffer_head, fs/buffer.c of Linux.
    """
    room = free_bytes() - size_bytes >= SPARE * (taken_bytes + size_bytes)
    if not room or not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create(name)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # now: the next one asks what is left
            # By another number: the lowest stays for what is opened when as many may not be open.
            return os.dup(descriptor)
        finally:
            os.close(descriptor)
    return None


def reserve(descriptor: int, size_bytes: int) -> None:
    """Give a file its blocks now: a full disk found later would be a SIGBUS while drawing.

    Raises:
        ConfigError: when the folder of temporary files is full.
    """
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as failure:
        raise ConfigError(
            f"{tempfile.gettempdir()}: no room for {bytes_text(size_bytes)} of initial weights "
            f"({failure.strerror}); try: TMPDIR=… names a folder on a larger disk"
        ) from failure


def _free() -> Iterator[int]:
    """Bytes that are free of the machine, and of each cgroup with a limit around us."""
    yield int(psutil.virtual_memory().available)
    try:
        lines = [line.split(":", 2) for line in OWN.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return
    for _, kinds, own in lines:
        if kinds not in FILES:
            continue
        for path in (folder := Path(GROUPS, kinds, own.lstrip("/")), *folder.parents):
            try:
                most, used = (
                    int((path / name).read_text(encoding="utf-8")) for name in FILES[kinds]
                )
            except (OSError, ValueError):  # "max", or above the root
                continue
            yield max(0, most - used)
