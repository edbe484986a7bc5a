"""Where these checks run: the GPU, or the CPU by a switch, with sizes that fit.

SHOAL_TEST_DEVICE=cpu   every check on the CPU, small, so that none of its lines is new on the day
SHOAL_TEST_SMALL=1      small sizes on a GPU: a simulated one
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch

ON_GPU = os.environ.get("SHOAL_TEST_DEVICE", "cuda") == "cuda"
# With its index: tensors' devices have one, and `cuda` does not equal `cuda:0`.
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
SMALL = not ON_GPU or os.environ.get("SHOAL_TEST_SMALL", "") == "1"
PATIENCE = float(os.environ.get("SHOAL_TEST_PATIENCE", "1"))  # `run.py --patience`, for rows
GPUS = torch.cuda.device_count() if ON_GPU else 0
UNTIL_S = float(os.environ.get("SHOAL_TEST_UNTIL_S", "inf"))  # of time.monotonic, set by `run.py`


def left_s() -> float:
    """Seconds until this part's time limit."""
    return UNTIL_S - time.monotonic()


def pick(full: Any, small: Any) -> Any:
    """The size for this device."""
    return small if SMALL else full


def synchronize() -> None:
    """Wait until the device has done all it was given."""
    if ON_GPU:
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that `work` allocated beyond what was there; 0 on the CPU, which does not count."""
    if not ON_GPU:
        work()
        return 0
    gc.collect()  # what an earlier check left would be let go in the middle of this one
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
