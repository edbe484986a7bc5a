"""Deadline of an island for the others, learnt from the durations of past exchanges.

A dead process is detected at once, because its connections close. A deadline is for silence: a
stopped process, a cut link. Too short a deadline ends a healthy run; too long a deadline only
wastes time. So it is generous, and follows the measured durations of exchanges, including waits for
slower islands:

    slowest     = max over the last 20 exchanges of  seconds · max(1, bytes / their bytes)
    deadline_s  = 15 + max(round_s, 3 · (1 + 4/n) · slowest),  at most 1800 s over the larger one
    no exchange yet, or only ones with less than 1/16 of the bytes:  600 + round_s

15 s     a link that is cut for 5 s is silent for longer: TCP doubles its wait after each
         retransmission, so the next try may come 13 s after the cut began. This is added,
         not a floor, because an exchange may take its usual time before or after the cut
3 (1+4/n)  n past exchanges: one is little evidence (15 ×), twenty are much (3.6 ×)
round_s  the island's own inner steps of this round: giving up sooner costs more, the round and a
         restart, than waiting
600 s    others may still load, compile or download when the first exchange starts; also the least
         if one of them is known to do other work first, such as validation
1800 s   a dead island is detected within half an hour, whatever was learnt

Clocks of different machines are never compared: seconds come from this process's `time.monotonic`.

Source: Jacobson 1988 (time-outs from measured round trips); RFC 6298 (doubling of retries)
"""

from __future__ import annotations

from collections import deque

WINDOW = 20
GRACE_S = 15.0
FIRST_S = 600.0
MOST_S = 1800.0
FACTOR = 3.0
DOUBT = 4.0
COMPARABLE = 16


class PeerDeadline:
    """Deadline of one process for its next exchange with other islands, learnt from past ones."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._paused = False

    def extend_next_deadline(self) -> None:
        """Allow extra time before the next exchange: another island does other work first."""
        self._paused = True

    def record_exchange(self, seconds: float, size_bytes: int) -> None:
        """Learn from a successful exchange of that many bytes; failed ones are not passed here."""
        self._past.append((seconds, size_bytes))
        self._paused = False

    def deadline_s(self, size_bytes: int, round_s: float = 0.0) -> float:
        """Return the allowed silence in an exchange of so many bytes, in seconds.

        Args:
            round_s: seconds of this island's inner steps since the last exchange.
        """
        seen, unknown_s = self._comparable(size_bytes), FIRST_S + round_s
        if not seen:
            return unknown_s
        slowest = max(seen)
        wait_s = max(round_s, FACTOR * (1 + DOUBT / len(seen)) * slowest)
        learnt_s = min(GRACE_S + wait_s, MOST_S + max(round_s, slowest))
        return max(learnt_s, unknown_s) if self._paused else learnt_s

    def _comparable(self, size_bytes: int) -> list[float]:
        return [
            seconds * max(1.0, size_bytes / max(1, of_bytes))
            for seconds, of_bytes in self._past
            if size_bytes <= COMPARABLE * max(1, of_bytes)
        ]
