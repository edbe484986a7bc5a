"""Peak memory of this process, and page-wise reads of memory-mapped files.

The kernel reads a mapped file on access, and reads ahead around each access: 128 KiB, or 8 MiB if
the disk is set to it. A process that needs some rows would thus read most of the file.
`disable_read_ahead` disables this read-ahead, and `read_ahead` requests exactly the pages that the
process will access.
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

from shoal.fabric.device import is_accelerator, peak_bytes, reset_peak_bytes

PROCESS = Path("/proc/self")

USED: list[tuple[int, int]] = []
"""Address ranges, [start, stop), in which the kernel reads only accessed pages."""

REQUEST_BYTES = 2**17
"""Linux truncates longer requests to the disk's read-ahead, by default 128 KiB."""

LEAST_RUN = 4 * mmap.PAGESIZE
"""Shorter parts of rows are not requested one by one: their pages hold as much of other parts."""

_peak_read: tuple[float, int] = (-math.inf, 0)
"""Time of the last reading of the peak of resident bytes (`time.monotonic`), and its value."""


_heap_limit, _was_trimmed = 0, False
"""Resident bytes above which `trim_grown_heap` trims (0: not known yet); whether it just did."""

TRIM_EVERY = 4
"""Steps from one `trim_grown_heap` to the next; one takes 10 µs if there is nothing to do."""

HEAP_SLACK = 64 * 2**20
"""Bytes by which any process may grow without a trim."""

FRESH_S = 0.1
"""CPU steps within this many seconds share a reading of the process's peak memory."""


def peak_memory_bytes(device: torch.device, *, fresh: bool = True) -> int:
    """Return this process's peak memory since its start, or since `reset_peak_memory`.

    Args:
        device: device of the tensors.
        fresh: read the peak now. False: on a CPU a value of the last `FRESH_S` suffices, since a
            reading takes 30 µs.

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


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of `peak_memory_bytes` to the memory held now; on a CPU under Linux only.

    On a CPU freed memory of the heap goes back to the system first. Otherwise what an earlier phase
    freed would count as held, although the next phase takes the same memory again: after the proof
    of the demo under ddp rank 0 held 510 MiB, and 348 after a trim.
    """
    global _peak_read
    _peak_read = -math.inf, 0
    if is_accelerator(device):
        reset_peak_bytes(device)
        return
    trim_heap()
    with contextlib.suppress(OSError):
        (PROCESS / "clear_refs").write_text("5", encoding="utf-8")


def trim_heap() -> None:
    """Return freed memory of the C heap to the system; do nothing without glibc.

    glibc keeps freed blocks below 32 MiB, many of them if they lie between live blocks. Under fsdp
    on 4 ranks a start left 429 MiB, and 182 after a trim; a trim takes 5 ms.

    References:
        malloc_trim(3), mallopt(3): M_MMAP_THRESHOLD grows to the largest block freed.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def trim_grown_heap() -> None:
    """Return freed heap to the system if this process has grown by an eighth since its first steps.

    A step that frees large aligned blocks and asks for them again leaves holes between blocks that
    live, and glibc 2.36 does not fill such a hole with a block of its size. Buffers of zero1 and
    zero2 are kept (`TransferBuffer`); before, an MLP of 50M weights on 2 ranks grew by 48 MiB a
    step. Autograd's own gradients and user code still leave holes. What the process holds again at
    the call after a trim is its own, and is allowed from then on.

    References:
        malloc(3), aligned_alloc; proc_pid_statm(5).
    """
    global _heap_limit, _was_trimmed
    try:
        pages = int((PROCESS / "statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return
    resident = pages * mmap.PAGESIZE
    if resident <= _heap_limit:
        _was_trimmed = False
    elif _heap_limit and not _was_trimmed:
        _was_trimmed = True
        trim_heap()
    else:
        _heap_limit, _was_trimmed = resident + resident // 8 + HEAP_SLACK, False


def disable_read_ahead(start: int, stop: int) -> None:
    """Disable read-ahead for the files that are mapped at these addresses.

    `read_ahead` then requests more pages at once. Does nothing outside of Linux.

    References:
        madvise(2), MADV_RANDOM.
    """
    advised = sys.platform == "linux" and _advise(start, stop, mmap.MADV_RANDOM)
    if advised and (start, stop) not in USED:
        USED.append((start, stop))


def is_read_ahead_disabled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in an address range of `disable_read_ahead`."""
    if not USED or not tensor.numel() or tensor.layout != torch.strided:
        return False
    here = tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return here and any(low <= tensor.data_ptr() < high for low, high in USED)


def read_ahead(tensor: torch.Tensor) -> None:
    """Request exactly the pages that hold a tensor's elements, without waiting for them.

    Does nothing for a tensor outside the ranges of `disable_read_ahead`. If parts of rows are
    shorter than `LEAST_RUN`, it requests whole rows: other ranks of the machine need the rest of
    them.

    References:
        madvise(2), MADV_WILLNEED.
    """
    if not is_read_ahead_disabled(tensor):
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
    """Call madvise(2) on whole pages of this process; return whether the kernel accepted it."""
    first = start - start % mmap.PAGESIZE
    size = ctypes.c_size_t(stop - first)
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, advice) == 0
