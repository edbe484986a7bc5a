"""What this machine has, found without torch: cores, memory, GPUs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shoal.base.facts import MachineFacts, usable_cores


def this_machine() -> MachineFacts:
    """Cores that this process may use, memory in bytes, NVIDIA GPUs that are visible to it."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineFacts(usable_cores(), memory_bytes, _gpus())


def _gpus() -> int:
    """Device files, narrowed by CUDA_VISIBLE_DEVICES."""
    devices = Path("/dev")
    present = sum(1 for p in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([v for v in visible.split(",") if v.strip() not in ("", "-1")]))
