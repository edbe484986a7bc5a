"""Facts: what is known of a model and of a machine, as plain numbers that arithmetic can use."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FREE = 0.5
"""Share of a rank's memory that stays free where nobody foresees what a pass needs."""

STATE_BYTES = 16
"""Bytes of a weight with its gradient and Adam's states."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Is there where Linux gives huge pages to who asks for them."""


def usable_cores() -> int:
    """Count the CPU cores that this process may run on: its affinity, else all of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class MachineFacts:
    """One machine: CPU cores this process may use, all main memory, visible NVIDIA GPUs."""

    cores: int
    memory_bytes: int
    gpus: int


def default_processes(machine: MachineFacts) -> int:
    """Returns how many processes to start: one per GPU; without any two, on a single core one.

    >>> default_processes(MachineFacts(cores=2, memory_bytes=2**34, gpus=0))
    2
    """
    if machine.gpus:
        return machine.gpus
    return 2 if machine.cores >= 2 else 1


def this_machine() -> MachineFacts:
    """Look up this machine's facts, without initialising CUDA.

    GPUs are NVIDIA's device files, as many as CUDA_VISIBLE_DEVICES leaves. A container's limit on
    memory is not looked at.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineFacts(usable_cores(), memory_bytes, _gpus())


def host_memory_variables() -> dict[str, str]:
    """Return the variables under which torch gives memory of the host back, and takes it cheaply.

    With huge pages large tensors begin on one, so what was freed fits the next of its size: an MLP
    of 50M weights held 1,173 MiB under ddp and holds 870. torch reads it before its first tensor.

    References:
        torch c10/core/impl/alloc_cpu.cpp; madvise(2), MADV_HUGEPAGE.
    """
    return {"THP_MEM_ALLOC_ENABLE": "1"} if HUGE_PAGES.exists() else {}


def _gpus() -> int:
    """Device files, narrowed by CUDA_VISIBLE_DEVICES."""
    devices = Path("/dev")
    present = sum(1 for p in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
