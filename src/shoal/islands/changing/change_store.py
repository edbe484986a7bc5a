"""Bytes of the changes of a turn: this member's, and those fetched from other members.

A change is fetched as soon as somebody names it, from its member or from the chair, which has all
that it offers. Its units (`canonical_units.py`) have a SHA-256 each, so altered bytes never count.

    name             of a change: the SHA-256 of the list of its units' hashes
    change/NAME      the number of ranks of the island that answers, and that list
    change/NAME/A-B  units A … B − 1, from a rank that has them

A rank fetches the units that it merges. Which rank of another island has them follows from that
island's number of ranks, so islands may have different numbers of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from shoal.base.errors import ConfigError
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing.canonical_units import CanonicalUnits
from shoal.islands.membership.committed_turn import TurnProposal
from shoal.islands.membership.turn_messages import ALL_VOTE, Ballot

TRIES, PAUSE_S = 3, 0.2
KEY = "change/"
HASH_BYTES = hashlib.sha256().digest_size
RANKS_BYTES, MOST_RANKS = 4, 65_536
"""Bytes of the number of ranks before a list of hashes · largest number that is believed."""


def hash_list(hashes: bytes) -> str:
    """Return the name of a change whose units have these hashes."""
    return hashlib.sha256(hashes).hexdigest()


class ChangeStore:
    """This rank's units of the changes of the turn that is being decided.

    Args:
        units: of a change · unit_bytes: encoded size of each.
        rank: of this process in its island · ranks: of the island.

    Attributes:
        notify: called in another thread with the name of a change after its fetch, also a vain one.
    """

    def __init__(
        self, units: CanonicalUnits, unit_bytes: Sequence[int], rank: int = 0, ranks: int = 1
    ) -> None:
        self.units, self.unit_bytes, self.ranks = units, unit_bytes, ranks
        self.first, self.last = units.cuts(ranks)[rank : rank + 2]
        self.links: MemberLinks | None = None
        self.notify: Callable[[str], None] = lambda name: None
        self._lists: dict[str, bytes] = {}
        self._changes: dict[str, dict[int, bytes]] = {}
        self._fetching: set[str] = set()

    def add(self, name: str, hashes: bytes, own: Sequence[bytes]) -> None:
        """Keep this rank's units of this member's own change.

        Args:
            name, hashes: of the whole change.
        """
        self._lists[name] = hashes
        self._changes[name] = dict(enumerate(own, self.first))

    def clear(self) -> None:
        """Forget the changes of a turn that is decided."""
        self._changes.clear()
        self._lists.clear()

    def find(self, proposals: Sequence[TurnProposal]) -> list[list[bytes]] | None:
        """Return this rank's units of the changes of proposals; None if one is missing."""
        if not all(self._has_all(one.change) for one in proposals):
            return None
        own = range(self.first, self.last)
        known = [self._changes.get(one.change, {}) for one in proposals]
        return [[units[place] for place in own] for units in known]

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return bytes of a list or of units for another member; called in other threads."""
        name, _, wanted = key.removeprefix(KEY).partition("/")
        if not wanted:
            hashes = self._lists.get(name)
            told = b"" if hashes is None else self.ranks.to_bytes(RANKS_BYTES, "big") + hashes
            return None if hashes is None else (len(told), told[offset : offset + length])
        known, places = self._changes.get(name, {}), _parse_range(wanted, len(self.unit_bytes))
        if not places or not all(place in known for place in places):
            return None
        return _cut_joined([known[place] for place in places], offset, length)

    def is_missing(self, proposal: TurnProposal) -> bool:
        """Return whether a change is neither here nor on its way."""
        return not self._has_all(proposal.change) and proposal.change not in self._fetching

    def fetch(self, proposal: TurnProposal, ballot: Ballot) -> None:
        """Start to fetch this rank's units of a member's change, unless they are here."""
        change, names = proposal.change, [proposal.seat.name]
        if ballot != ALL_VOTE:
            names.append(ballot[1])
        if not self.is_missing(proposal):
            return
        self._fetching.add(change)
        work = threading.Thread(
            target=self._run, args=(change, names), name="island-fetch", daemon=True
        )
        work.start()

    def _has_all(self, change: str) -> bool:
        known = self._changes.get(change, {})
        return all(place in known for place in range(self.first, self.last))

    def _run(self, change: str, names: Sequence[int]) -> None:
        for _ in range(TRIES):
            for name in names:
                self._fetch_from(name, change)
                if self._has_all(change):
                    break
            if self._has_all(change):
                break
            time.sleep(PAUSE_S)
        self._fetching.discard(change)
        self.notify(change)

    def _fetch_from(self, name: int, change: str) -> None:
        """Fetch the units that this rank lacks from the ranks of an island that have them."""
        links = self.links
        with contextlib.suppress(OSError, ConfigError, KeyError):
            told = None if links is None else links.fetch(name, KEY + change)
            if links is None or told is None:
                return
            ranks = int.from_bytes(told[:RANKS_BYTES], "big")
            hashes = told[RANKS_BYTES:]
            count = len(self.unit_bytes)
            if hash_list(hashes) != change or len(hashes) != count * HASH_BYTES:
                return
            if not 0 < ranks <= MOST_RANKS:
                return
            self._lists[change] = hashes
            known = self._changes.setdefault(change, {})
            for rank, (first, last) in enumerate(pairwise(self.units.cuts(ranks))):
                first, last = max(first, self.first), min(last, self.last)
                if first >= last or all(place in known for place in range(first, last)):
                    continue
                found = links.fetch(name, f"{KEY}{change}/{first}-{last}", lane=rank)
                if found is not None:
                    self._keep(known, found, hashes, first, last)

    def _keep(
        self, known: dict[int, bytes], found: bytes, hashes: bytes, first: int, last: int
    ) -> None:
        """Keep the fetched units whose hashes are right."""
        at = 0
        for place in range(first, last):
            unit = found[at : at + self.unit_bytes[place]]
            at += len(unit)
            right = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            if hashlib.sha256(unit).digest() == right:
                known[place] = unit


def _parse_range(text: str, count: int) -> range:
    """Return the units of a key; none if it is malformed.

    >>> _parse_range("2-5", 9), _parse_range("2-", 9)
    (range(2, 5), range(0, 0))
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        return range(0)
    return range(int(first), min(int(last), count))


def _cut_joined(units: Sequence[bytes], offset: int, length: int) -> tuple[int, bytes]:
    """Return the size of joined units, and some bytes of it.

    >>> _cut_joined([b"abc", b"de"], 2, 2)
    (5, b'cd')
    """
    parts, at = [], 0
    for unit in units:
        parts.append(unit[max(0, offset - at) : max(0, offset + length - at)])
        at += len(unit)
    return at, b"".join(parts)
