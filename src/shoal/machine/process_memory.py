"""How much memory this process has used at most, and which parts of mapped files it reads.

A file that is mapped is read where it is looked at. Linux then reads around each place, as much as
the disk is set to (128 KiB, 8 MiB where that was raised): most of a file of which a process wants
some rows. So it is told not to (`read_as_used`), and what will be looked at is asked for before
(`read_ahead`), no page more than that.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import resource
import sys
import time
from pathlib import Path

import torch

from shoal.fabric.device import forget_peak_bytes, is_accelerator, peak_bytes

PROCESS = Path("/proc/self")

USED: list[tuple[int, int]] = []
"""Addresses, from and to, in which nothing but what is looked at is read."""

REQUEST_BYTES = 2**17
"""Linux cuts longer requests short, at the disk's read-ahead: 128 KiB where nobody changed it."""

LEAST_RUN = 4 * mmap.PAGESIZE
"""Shorter parts of rows are not asked for one by one: their pages hold as much of other parts."""

_peak_read: tuple[float, int] = (-math.inf, 0)
"""When the peak of resident bytes was read last (`time.monotonic`), and what it was."""


FRESH_S = 0.1
"""Steps on a CPU that are shorter share a reading of the process's peak memory."""


def peak_memory_bytes(device: torch.device, *, fresh: bool = True) -> int:
    """Return this process's peak since its start, or since `forget_peak`.

    Args:
        device: where tensors lie.
        fresh: read it now; else, on a CPU, a figure of the last `FRESH_S` will do: a reading takes
            30 µs.

    Returns:
        Bytes: on a GPU of allocated memory, on the CPU of resident memory.
    """
    global _peak_read
    if is_accelerator(device):
        return peak_bytes(device)
    now_s = time.monotonic()
    if fresh or now_s - _peak_read[0] >= FRESH_S:
        _peak_read = now_s, _resident_peak_bytes()
    return _peak_read[1]


def _resident_peak_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in (PROCESS / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak(device: torch.device) -> None:
    """Reset what `peak_memory_bytes` tells to what is held now; on a CPU under Linux only."""
    global _peak_read
    _peak_read = -math.inf, 0
    if is_accelerator(device):
        forget_peak_bytes(device)
        return
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")


def trim_heap() -> None:
    """Return freed memory of the C heap to the system; nothing happens without glibc.

    glibc keeps blocks below 32 MiB that were freed, and where they lie between others it keeps many
    of them. Under fsdp on 4 ranks 429 MiB stayed behind a start, 182 with it; it takes 5 ms.

    References:
        malloc_trim(3), mallopt(3): M_MMAP_THRESHOLD grows to the largest block freed.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def read_as_used(start: int, stop: int) -> None:
    """Read of the files that are mapped at these addresses only the pages that somebody looks at.

    `read_ahead` then asks for more at once. Nothing happens outside of Linux.

    References:
        madvise(2), MADV_RANDOM.
    """
    advised = sys.platform == "linux" and _advise(start, stop, mmap.MADV_RANDOM)
    if advised and (start, stop) not in USED:
        USED.append((start, stop))


def is_read_as_used(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where `read_as_used` was told."""
    if not USED or not tensor.numel() or tensor.layout != torch.strided:
        return False
    here = tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return here and any(low <= tensor.data_ptr() < high for low, high in USED)


def read_ahead(tensor: torch.Tensor) -> None:
    """Ask for the pages in which a tensor's numbers lie, and no others; does not wait for them.

    Nothing is asked of a tensor that is not where `read_as_used` was told. Of parts of rows that
    are shorter than `LEAST_RUN` whole rows are: other ranks of the machine want the rest of them.

    References:
        madvise(2), MADV_WILLNEED.
    """
    if not is_read_as_used(tensor):
        return
    start, width = tensor.data_ptr(), tensor.element_size()
    run, dims = 1, [one for one in zip(tensor.shape, tensor.stride(), strict=True) if one[0] > 1]
    while dims and dims[-1][1] == run:
        run *= dims.pop()[0]
    if run * width < LEAST_RUN:
        run, dims = 1 + sum((n - 1) * step for n, step in dims) + run - 1, []
    starts = [0]
    for count, step in dims:
        starts = [place + k * step for place in starts for k in range(count)]
    for place in starts:
        first, stop = start + place * width, start + (place + run) * width
        for at in range(first, stop, REQUEST_BYTES):
            _advise(at, min(at + REQUEST_BYTES, stop), mmap.MADV_WILLNEED)


def _advise(start: int, stop: int, advice: int) -> bool:
    """Tell the system about whole pages of this process; whether it took the advice."""
    first = start - start % mmap.PAGESIZE
    size = ctypes.c_size_t(stop - first)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, advice) == 0
