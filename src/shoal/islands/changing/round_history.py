"""History of an island: the digest of its merged weights after each round, as events.jsonl has it.

Two islands have one history if the digests of a round are equal. A run has two of them if an island
began again on an empty disk, or went on alone, while others trained on. Where they meet, that of
the later session goes on; an island of the other one leaves its rounds, and keeps its checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from shoal.base.runlog.damaged_lines import parse_event

COMMITTED, DROPPED = "round_committed", "rounds_dropped"


class HistoryFork(NamedTuple):
    """Rounds of an island that are not in another history.

    Attributes:
        first, last: their numbers, as `round 7:` of the terminal.
        is_known: the other history has one of these rounds, with other weights.
    """

    first: int
    last: int
    is_known: bool


def read_history(folder: Path) -> dict[int, str]:
    """Return the digest after each committed round of a run folder, by the round's number."""
    found: dict[int, str] = {}
    try:
        with (folder / "events.jsonl").open("rb") as file:
            lines = [line for line in file if b'"round' in line]
    except OSError:
        return {}
    for event in filter(None, map(parse_event, lines)):
        number = event.get("round", event.get("first"))
        if not isinstance(number, int):
            continue
        if event["event"] == COMMITTED:
            found[number] = str(event.get("digest"))
        elif event["event"] == DROPPED:
            found = {one: digest for one, digest in found.items() if one < number}
    return found


def encode_history(history: dict[int, str]) -> bytes:
    """Return a history as bytes for another island."""
    return json.dumps(history).encode()


def decode_history(data: bytes) -> dict[int, str]:
    """Return the history of another island.

    Raises:
        ValueError: it is damaged.
    """
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("no history")
    return {int(number): str(digest) for number, digest in found.items()}


def find_fork(own: dict[int, str], other: dict[int, str], last: int) -> HistoryFork | None:
    """Return the own rounds that another history lacks; None if it has the last one.

    Args:
        last: number of the own newest round; `own` has it.

    >>> find_fork({0: "a", 1: "b"}, {0: "a", 1: "b", 2: "c"}, 1)
    >>> find_fork({0: "a", 1: "b", 2: "x"}, {0: "a", 1: "b", 2: "c"}, 2)
    HistoryFork(first=2, last=2, is_known=True)
    >>> find_fork({4: "x"}, {9: "y"}, 4)
    HistoryFork(first=4, last=4, is_known=False)
    """
    equal = [number for number, digest in own.items() if other.get(number) == digest]
    if last in equal:
        return None
    first = 1 + max((one for one in equal if one < last), default=min(own) - 1)
    return HistoryFork(first, last, is_known=any(first <= one <= last for one in other))
