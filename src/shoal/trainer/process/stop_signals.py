"""Signal handlers that request a stop of the run, which all ranks make after a step.

SIGTERM, Ctrl-C and SIGUSR1 (which Slurm sends by `--signal=USR1@120`) set a flag wherever the rank
is. The run reads it where all ranks can stop together: after a step, and between two micro-batches
of a validation.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ECHO_S = 0.5
"""A Ctrl-C this soon after another signal is its copy: wrappers and launchers forward one twice."""


def install_stop_handlers(
    ask: Callable[[], None], own: Callable[[str], None] | None = None
) -> Callable[[], None]:
    """Install signal handlers that call `ask`.

    Args:
        own: reports a line to the user of their own loop. There a signal that was ignored before
            (of a background job) stays ignored. A second Ctrl-C raises KeyboardInterrupt at once. A
            thread that receives no signals (Ray's) installs nothing.

    Returns:
        A function that restores the earlier handlers.
    """
    if own is not None and threading.current_thread() is not threading.main_thread():
        own("run.stop_on_signals: a process's main thread alone hears signals, this is another one")
        return lambda: None
    first_s: list[float] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        ask()
        now_s = time.monotonic()
        if own and number == signal.SIGINT and first_s and now_s - first_s[0] > ECHO_S:
            raise KeyboardInterrupt
        first_s.append(now_s)

    before: dict[int, Any] = {}
    for number in SIGNALS:
        if not (own and signal.getsignal(number) == signal.SIG_IGN):
            before[number] = signal.signal(number, on_signal)

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return put_back
