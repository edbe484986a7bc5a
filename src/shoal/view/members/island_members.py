"""Members of a run of islands by round: who merged, with how much, who came and who left.

Islands that come and go write it into every event of a round (`members`, `joined`, `left`), so one
island's folder tells of all. Of a fixed list each island's own events tell of itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from shoal.base.text.units import count_text
from shoal.islands.membership.committed_turn import is_witness

Record = dict[str, Any]
ENDED, DROPPED = ("round_committed", "round_discarded"), "rounds_dropped"


@dataclass
class RoundMembers:
    """Members of one round.

    Attributes:
        work: island → its steps, samples and tokens; samples are None where nobody wrote them.
        joined: islands that take part from the next round on.
        left: island → why it takes no part in the next round.
        refused: island → why its change did not count.
        why: why the round was discarded, or who was absent.
    """

    round: int
    committed: bool
    work: dict[int, dict[str, int | None]] = field(default_factory=dict)
    joined: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    why: str = ""

    def to_json(self) -> Record:
        """Return JSON values."""
        return asdict(self)


def collect_members(events_of: Mapping[int, Iterable[Record]]) -> list[RoundMembers]:
    """Return the members of every round, in order; a discarded try stands before its round.

    Args:
        events_of: events of the islands whose folders are here, by island.

    >>> told = {
    ...     "event": "round_committed",
    ...     "round": 0,
    ...     "members": [[0, 4, 8, 40], [2, 4, 8, 40]],
    ...     "joined": [1],
    ...     "left": {"3": "island 3: its process ended"},
    ... }
    >>> (found,) = collect_members({0: [told], 2: [told]})
    >>> sorted(found.work), found.joined, found.left
    ([0, 2], [1], {3: 'island 3: its process ended'})
    """
    rounds: dict[tuple[int, int], RoundMembers] = {}
    for island, events in events_of.items():
        tries: dict[int, int] = {}
        for event in _omit_dropped(events):
            if event.get("event") not in ENDED or not isinstance(event.get("round"), int):
                continue
            number, committed = event["round"], event["event"] == ENDED[0]
            attempt = -1 if committed else tries.get(number, 0)
            tries[number] = tries.get(number, 0) + (not committed)
            key = (number, 1 << 30 if committed else attempt)
            one = rounds.setdefault(key, RoundMembers(number, committed))
            _add_event(one, island, event)
    return [rounds[key] for key in sorted(rounds)]


def _omit_dropped(events: Iterable[Record]) -> list[Record]:
    """Return the events without rounds that another history of the run replaced."""
    kept: list[Record] = []
    for event in events:
        first = event.get("first")
        if event.get("event") == DROPPED and isinstance(first, int):
            kept = [one for one in kept if one.get("event") not in ENDED or one["round"] < first]
        kept.append(event)
    return kept


def _add_event(one: RoundMembers, island: int, event: Record) -> None:
    if "members" in event:
        for name, steps, samples, tokens in event["members"]:
            one.work[int(name)] = {"steps": steps, "samples": samples, "tokens": tokens}
    elif one.committed and island in (event.get("admitted") or []):
        own = {"steps": event.get("steps"), "samples": None, "tokens": event.get("tokens")}
        one.work[island] = own
    one.joined = event.get("joined") or one.joined
    one.left |= {int(k): str(why) for k, why in (event.get("left") or {}).items()}
    one.refused |= {int(k): str(why) for k, why in (event.get("refused") or {}).items()}
    one.why = one.why or str(event.get("why") or "")


def list_missing_rounds(rounds: Iterable[RoundMembers]) -> list[tuple[int, int]]:
    """Return the first and last number of each gap between the recorded rounds.

    >>> list_missing_rounds([RoundMembers(2, True), RoundMembers(3, True), RoundMembers(5, True)])
    [(0, 1), (4, 4)]
    """
    numbers = sorted({-1, *(one.round for one in rounds)})
    return [(a + 1, b - 1) for a, b in itertools.pairwise(numbers) if b > a + 1]


def member_lines(rounds: Sequence[RoundMembers]) -> list[str]:
    """Return the table of members: a head, and a line for each round or gap."""
    lines = [f"{'round':>6}  {'tokens':>8}  members (steps)"]
    gaps = {last: first for first, last in list_missing_rounds(rounds)}
    for one in rounds:
        if (first := gaps.pop(one.round - 1, None)) is not None:
            count = one.round - first
            which = f"{first} – {one.round - 1}" if count > 1 else f"{first}"
            lines.append(
                f"{which:>6}  {'':>8}  {count} round{'s' * (count > 1)} without this island; "
                f"another island's folder tells of {'them' if count > 1 else 'it'}"
            )
        number = f"{one.round}" if one.committed else f"{one.round} ✗"
        tokens = sum(work["tokens"] or 0 for work in one.work.values())
        members = " ".join(f"{k}({one.work[k]['steps']})" for k in sorted(one.work))
        parts = [members or f"discarded: {one.why or 'no reason was written'}"]
        parts += [f"joined: {', '.join(map(_label, one.joined))}"] if one.joined else []
        parts += [f"left: {why}" for _, why in sorted(one.left.items())]
        parts += [f"refused: {why}" for _, why in sorted(one.refused.items())]
        if one.committed and one.why and not one.left and not one.refused:
            parts.append(f"absent: {one.why}")
        lines.append(f"{number:>6}  {count_text(tokens):>8}  {'; '.join(parts)}")
    return lines


def _label(name: int) -> str:
    return "the witness" if is_witness(name) else str(name)
