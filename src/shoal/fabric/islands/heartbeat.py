"""Heartbeats of islands through the store, which decide the island to blame for a failure.

A failed transfer does not show its cause: all participating islands see their connections close, or
wait until a deadline. So every BEAT_S each island publishes a beat: it is alive, the calls it has
started, and the islands it gave up on. It also reads the others' beats. A separate thread does this
over its own connection, since a lost store may never answer. After a failure the island reads the
last beats. First match wins:

    given up   others already gave up on an island: that one, whatever this island sees
    silent     an island sent no beat for SILENT_S; a store that does not answer means island 0
    late       all are alive, but some have not started the call in which this island waits
    cut off    all are alive and have started it: a link between some of them is dead

Clocks are monotonic and local: no time of another machine is ever compared. Whoever reaches the
store may write there. A malformed beat (no JSON, other types, a megabyte) is ignored and reported
once; the thread continues.

Source: failure detectors by heartbeat, Chandra and Toueg 1996. Beats accuse; only deadlines decide.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from shoal.base.errors import ClusterError
from shoal.fabric._torch import clone_store_connection

BEAT_S, SILENT_S, LOOK_S = 0.5, 2.5, 0.02
STORE_ISLAND = 0
MOST_BYTES = 64 * 1024
"""Most bytes of a beat; a real one has a few hundred."""
MOST_WORDS = 200


class IslandLost(ClusterError):
    """Failure of an exchange between islands.

    Args:
        islands: the islands to blame, in order; this island itself if the others gave up on it.
        after_s: seconds from the start of the exchange until this island gave it up.
    """

    def __init__(self, message: str, islands: tuple[int, ...], after_s: float) -> None:
        super().__init__(message)
        self.islands, self.after_s = islands, after_s


class HeartbeatMessage(NamedTuple):
    """Last message of an island: started calls by plane, the islands it gave up on, and why."""

    begun: dict[str, int]
    given_up: tuple[tuple[int, ...], str] = ((), "")


def parse_heartbeat(raw: bytes, count: int) -> HeartbeatMessage:
    """Parse a beat from untrusted bytes.

    Args:
        count: number of islands.

    Raises:
        ValueError: the bytes are no beat; the message says why.

    >>> parse_heartbeat(b'[7, {"all": 3}, [1], "silent"]', 2)
    HeartbeatMessage(begun={'all': 3}, given_up=((1,), 'silent'))
    """
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{len(raw)} bytes, at most {MOST_BYTES} are read")
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    if not isinstance(said, list) or len(said) != 4:
        raise ValueError("not the four things that a beat says")
    beats, begun, islands, words = said
    if not _is_count(beats) or not isinstance(begun, dict) or not isinstance(words, str):
        raise ValueError("other types than a beat has")
    if not all(_is_count(calls) for calls in begun.values()):
        raise ValueError("other types than a beat has")
    if not isinstance(islands, list) or not all(_is_count(i) and i < count for i in islands):
        raise ValueError(f"it gives up on islands that are none of 0 … {count - 1}")
    return HeartbeatMessage(begun, (tuple(islands), words[:MOST_WORDS]))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class HeartbeatThread:
    """Heartbeat thread of this island, with the last beats of the others.

    Attributes:
        begun: calls that this island has started, by the name of the plane.
        tell: called with one line on each island's first malformed beat.
    """

    def __init__(
        self,
        store: dist.Store,
        index: int,
        count: int,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.store = clone_store_connection(store)
        self.tell = tell
        self.index, self.count = index, count
        self.begun: dict[str, int] = {}
        self._given_up: tuple[tuple[int, ...], str] = ((), "")
        self._beats = 0
        self._heard_s = [time.monotonic()] * count
        self._told = [HeartbeatMessage({}) for _ in range(count)]
        self._raw = [b""] * count
        self._strange: set[int] = set()
        self._answered_s = time.monotonic()
        self._ended = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="islands-pulse", daemon=True)
        self._beat()

    def start(self, deadline_s: float) -> None:
        """Wait for the first beat of every island, then beat and listen in the background.

        Raises:
            ClusterError: an island sends no beat in time, although it has joined
                (`island_rendezvous.py`).
        """
        keys = [f"beat/{index}" for index in range(self.count)]
        try:
            self.store.wait(keys, timedelta(seconds=deadline_s))
            self._listen()
        except (dist.DistError, RuntimeError) as failure:
            raise ClusterError(
                f"islands: not all {self.count} came within {deadline_s:g} s: {failure}"
            ) from failure
        self._thread.start()

    def close(self) -> None:
        """Publish a last beat, then stop."""
        if self._thread.is_alive():
            self._ended.set()
            self._soon.set()
            self._thread.join(2 * BEAT_S)
            if self._given_up[0] and self.index == STORE_ISLAND:
                time.sleep(2 * BEAT_S)  # else the store ends before the others read the last beat

    def report_given_up(self, islands: tuple[int, ...], words: str) -> None:
        """Publish the islands that this island gave up on, and the reason."""
        self._given_up = islands, words
        self._soon.set()

    def suspects(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the other members that missed a beat: suspect, but not yet silent."""
        now_s = time.monotonic()
        others = (member for member in members if member != self.index)
        return tuple(other for other in others if now_s - self._heard_s[other] > 2 * BEAT_S)

    def blame(self, members: Sequence[int], plane: str) -> tuple[tuple[int, ...], str]:
        """Return the islands to blame for a failure and the reason; takes up to SILENT_S + 1 s.

        Args:
            members: the islands of the plane that failed, this one among them.
        """
        failed_s = time.monotonic()
        others = [member for member in members if member != self.index]
        while True:
            for islands, words in (self._told[other].given_up for other in others):
                if self.index in islands:
                    return (self.index,), "the others gave up on this island"
                if islands:
                    return islands, words
            if silent := self._silent(others):
                return self._describe_silence(silent, others)
            # A beat read within BEAT_S of the failure may have been sent before it.
            if all(self._heard_s[other] > failed_s + 2 * BEAT_S for other in others):
                break
            time.sleep(LOOK_S)
        begun = self.begun.get(plane, 0)
        late = [other for other in others if self._told[other].begun.get(plane, 0) < begun]
        if late:
            return tuple(late), "alive, but did not come"
        return tuple(others), "alive, but the link to it carries nothing"

    def _describe_silence(
        self, silent: tuple[int, ...], others: Sequence[int]
    ) -> tuple[tuple[int, ...], str]:
        """Return the islands to blame and the reason, if these islands are silent.

        If the store's island ends because it gave up on another one, its last beat may get lost
        with the store. The beats before show who was silent first.
        """
        if silent != (STORE_ISLAND,):
            return silent, "silent"
        first = tuple(
            other
            for other in others
            if other != STORE_ISLAND and self._answered_s - self._heard_s[other] > 2 * BEAT_S
        )
        if first:
            return first, f"silent, and after that island {STORE_ISLAND}, which holds the store"
        return silent, "silent, or it gave up on another island: its own last lines say which"

    def _silent(self, others: Sequence[int]) -> tuple[int, ...]:
        answered_s = self._answered_s
        if time.monotonic() - answered_s > SILENT_S:
            return (STORE_ISLAND,) if self.index != STORE_ISLAND else tuple(others)
        # Up to the last answer: a lost store has no news of islands that are still alive.
        return tuple(other for other in others if answered_s - self._heard_s[other] > SILENT_S)

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._beat()
                self._listen()
                self._soon.wait(BEAT_S)
                self._soon.clear()
            self._beat()
        except (dist.DistError, RuntimeError):
            return  # the store is gone: `_silent` sees that it no longer answers

    def _beat(self) -> None:
        self._beats += 1
        # A copy in one go: the thread that exchanges adds to it meanwhile.
        said = [self._beats, dict(self.begun), *self._given_up]
        self.store.set(f"beat/{self.index}", json.dumps(said))

    def _listen(self) -> None:
        answers = self.store.multi_get([f"beat/{index}" for index in range(self.count)])
        self._answered_s = time.monotonic()
        for index, raw in enumerate(answers):
            if raw == self._raw[index]:
                continue
            self._raw[index] = raw
            try:
                self._told[index] = parse_heartbeat(raw, self.count)
            except ValueError as problem:
                self._report_malformed(index, str(problem))
            else:
                self._heard_s[index] = self._answered_s

    def _report_malformed(self, index: int, problem: str) -> None:
        if index not in self._strange:
            self._strange.add(index)
            self.tell(
                f"islands: a beat of island {index} was passed over: {problem}; somebody else "
                f"writes to the store at islands.at, use a network that only the islands reach"
            )
