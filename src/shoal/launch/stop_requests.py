"""Signal handlers that turn Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal into a stop request.

The first signal requests a clean stop; Ctrl-C after that means "now". Wrappers such as `uv run`
deliver one Ctrl-C twice, so a second one within half a second is its copy. A signal that was
ignored when the run began (nohup, a shell's background job) stays ignored.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1: what Slurm sends before the time of a job is over (`--signal=USR1@120`)."""
ASKED = (-signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT)
"""Exit codes of a worker that was asked to stop while it had nothing to save yet."""
ECHO_S = 0.5


class StopSignals:
    """Context in which STOP_SIGNALS are recorded as stop requests.

    `with StopSignals() as stop:` in the main thread; leaving restores the previous handlers. A
    signal that was ignored before stays ignored.

    Attributes:
        first: number of the first signal, None before it.
        insists: True once a SIGINT came more than 0.5 s after the first signal.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.insists = False
        self._since_s = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.first is None:
            self.first, self._since_s = number, now_s
        elif number == signal.SIGINT and now_s - self._since_s > ECHO_S:
            self.insists = True
