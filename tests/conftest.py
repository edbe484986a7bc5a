"""For all tests: Ctrl-C as at a terminal, and compiled sources for the processes that tests start.

A background job of a non-interactive shell starts with SIGINT ignored; the supervisor rightly keeps
such a choice, and its tests of Ctrl-C would wait in vain.

Under PYTHONDONTWRITEBYTECODE each of some 300 processes would compile Shoal anew: 1.1 CPU-seconds.
"""

from __future__ import annotations

import os
import signal
import sys

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
