"""Private names of torch that this room uses; tested on 2.13."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "all_threads_counted",
    "pytree",
    "without_new_groups",
]

_COUNTED = "FLAGS_caffe2_report_cpu_memory_usage"


@contextmanager
def all_threads_counted() -> Iterator[bool]:
    """While it lasts torch's CPU allocator counts on every thread, not only on profiled ones.

    Gives   whether it does: the flag is a C++ variable (c10/core/CPUAllocator.cpp) for which torch
            has no Python name; where a build hides it, other threads stay uncounted
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


@contextmanager
def without_new_groups(refuse: Callable[[str], None]) -> Iterator[None]:
    """While it lasts `refuse("new_group")` is called where a process group would be made.

    All ways to make one end in one function of torch's; to patch its public names would miss those
    who imported them before.
    """
    before = distributed_c10d._new_group_with_tag

    def refused(*args: Any, **named: Any) -> None:
        refuse("new_group")

    distributed_c10d._new_group_with_tag = refused
    try:
        yield
    finally:
        distributed_c10d._new_group_with_tag = before
