"""Private names of torch that this package uses; tested on 2.13."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

__all__ = ["count_all_threads", "pytree", "without_torch_functions"]

without_torch_functions = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses of tensors answer as plain tensors do."""
_COUNTED = "FLAGS_caffe2_report_cpu_memory_usage"


@contextmanager
def count_all_threads() -> Iterator[bool]:
    """Let torch's CPU allocator report allocations of every thread, not only of profiled ones.

    Yields:
        Whether all threads are counted. The flag is a C++ variable (c10/core/CPUAllocator.cpp)
        without a Python name; if a build hides it, other threads stay uncounted.
    """
    for path in (Path(torch.__file__).parent / "lib").glob("libc10.*"):
        try:
            flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(path)), _COUNTED)
        except (OSError, ValueError):
            continue
        before, flag.value = flag.value, True
        try:
            yield True
        finally:
            flag.value = before
        return
    yield False
