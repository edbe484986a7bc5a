"""Whether what islands last agreed on lies on this one's disk, as two threads tell each other.

The training thread begins a save after a committed round and hears how it ended; the thread that
exchanges votes on the next round. No island may vote before its save has ended, nor with yes after
one that failed: so whenever islands die, there is a round that all of them hold.
"""

from __future__ import annotations

import threading

PAUSE_S = 1.0
"""How long a vote waits for a save before the others are told that it is still being written."""


class LastSave:
    """The newest save of one process; before the first one there is nothing to wait for."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self.pause_s = pause_s
        self._ended, self._why = threading.Event(), ""
        self._ended.set()

    def begin(self) -> None:
        """From now on nothing is voted until `end`."""
        self._ended.clear()

    def end(self, why: str = "") -> None:
        """It is on disk, or `why` it is not."""
        self._why = why
        self._ended.set()

    def told(self) -> tuple[bool | None, str]:
        """(whether it is on disk, why not); None while it is written, for `pause_s` at most.

        >>> save = LastSave(pause_s=0.0)
        >>> save.begin(); save.told()
        (None, '')
        >>> save.end("disk full"); save.told()
        (False, 'disk full')
        """
        if not self._ended.wait(self.pause_s):
            return None, ""
        return not self._why, self._why
