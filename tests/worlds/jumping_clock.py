"""The wall clock of a process jumps every fifth of a second: an hour on, one more, two back.

    SHOAL_TEST_FIRST=jumping_clock      a fork of `forks.py`, and all that is forked from it

What C code reads jumps in `test_all_faults.py` alone, by a library that is loaded before all others.
"""

from __future__ import annotations

import time

_true_s = time.time


def _jumping_s() -> float:
    return _true_s() + 3600 * (int(5 * time.monotonic()) % 3)


time.time = _jumping_s
