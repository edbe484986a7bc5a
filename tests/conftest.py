"""For all tests: Ctrl-C means what it means at a terminal, also where the shell had it ignored.

A background job of a non-interactive shell starts with SIGINT ignored; the supervisor rightly keeps
such a choice, and its tests of Ctrl-C would wait in vain.
"""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
