"""Facts about a model and a machine, as plain numbers for arithmetic."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

FREE = 0.5
"""Share of a rank's memory that stays free if no estimate of a pass's memory exists."""

STATE_BYTES = 16
"""Bytes of a weight with its gradient and Adam's states."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""File that exists if Linux offers transparent huge pages on request."""


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
    """Return the number of processes to start: one per GPU; without GPUs two, on one core one.

    >>> default_processes(MachineFacts(cores=2, memory_bytes=2**34, gpus=0))
    2
    """
    if machine.gpus:
        return machine.gpus
    return 2 if machine.cores >= 2 else 1


def read_machine_facts() -> MachineFacts:
    """Read this machine's facts, without initialising CUDA.

    GPUs are NVIDIA's device files, as many as CUDA_VISIBLE_DEVICES leaves. A container's memory
    limit is not read.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineFacts(usable_cores(), memory_bytes, _gpus())


def host_memory_variables() -> dict[str, str]:
    """Return environment variables that make torch's host allocator free memory and use huge pages.

    With huge pages, large tensors start on a page boundary, so freed memory fits the next tensor of
    its size: an MLP of 50M weights used 1,173 MiB under ddp without them, and 870 with them. torch
    reads the variables before its first tensor.

    References:
        torch c10/core/impl/alloc_cpu.cpp; madvise(2), MADV_HUGEPAGE.
    """
    return {"THP_MEM_ALLOC_ENABLE": "1"} if HUGE_PAGES.exists() else {}


def _gpus() -> int:
    """Count NVIDIA's device files, limited by CUDA_VISIBLE_DEVICES."""
    devices = Path("/dev")
    present = sum(1 for p in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
