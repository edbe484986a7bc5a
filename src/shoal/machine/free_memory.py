"""Free memory for new allocations, and files that lie in memory only (memfd).

The free memory is that of the machine, or less in a cgroup, for example of a container. Page cache
counts as used in a cgroup, though the kernel could drop it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.base.errors import ConfigError
from shoal.base.text.units import bytes_text

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

FILES = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Limit and usage files, by the controller's name, for cgroups v2 ("") and v1."""

SPARE = 2
"""Memory that must stay free, as a multiple of the bytes of files in memory."""


def free_bytes() -> int:
    """Return the bytes free for new processes: of the machine, or less in this cgroup."""
    return min(_free_limits())


def create_memory_file(name: str, size_bytes: int, taken_bytes: int) -> int | None:
    """Create a file in memory (memfd), if twice the size of all such files stays free.

    That reserve is for data derived from the files: the kernel cannot write memfd pages to a disk.
    A file on a disk costs more than its pages: ext4 keeps a buffer head of 104 bytes per 4 KiB, 2.5
    % of a model. After half a minute the kernel also writes the whole file to the disk, to no use.

    Args:
        name: name of the file in /proc/PID/maps.
        taken_bytes: bytes of earlier files in memory that are still open.

    Returns:
        The file's descriptor; None if the caller must use a file on a disk.

    References:
        memfd_create(2); struct buffer_head, fs/buffer.c of Linux.
    """
    room = free_bytes() - size_bytes >= SPARE * (taken_bytes + size_bytes)
    if not room or not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):
        descriptor = os.memfd_create(name)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)  # now: the next call sees less free
            # A duplicate number: the lowest one stays free for opens near the descriptor limit.
            return os.dup(descriptor)
        finally:
            os.close(descriptor)
    return None


def reserve(descriptor: int, size_bytes: int) -> None:
    """Allocate a file's blocks now: a full disk would raise SIGBUS on a later write.

    Raises:
        ConfigError: the folder of temporary files is full.
    """
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as failure:
        raise ConfigError(
            f"{tempfile.gettempdir()}: no room for {bytes_text(size_bytes)} of initial weights "
            f"({failure.strerror}); try: TMPDIR=… names a folder on a larger disk"
        ) from failure


def _free_limits() -> Iterator[int]:
    """Yield the free bytes of the machine and of each enclosing cgroup with a limit."""
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
            except (OSError, ValueError):  # "max" (no limit), or above the cgroup's root
                continue
            yield max(0, most - used)


def free_device_bytes(device: torch.device) -> int:
    """Return a device's free bytes, with those that this process's allocator holds unused."""
    module: Any = torch.get_device_module(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)
