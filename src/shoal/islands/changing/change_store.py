"""Bytes of the changes of a turn: this member's, and those fetched from other members.

A change is fetched as soon as somebody names it, from its member or from the chair, which has all
that it offers. Its SHA-256 is its name, so altered bytes never count.

    name     of a change: the SHA-256 of each rank's piece, joined by dots
    rank k   of an island fetches piece k from rank k of the others, at their port + k
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence

from shoal.base.errors import ConfigError
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.membership.committed_turn import TurnProposal
from shoal.islands.membership.turn_messages import ALL_VOTE, Ballot

TRIES, PAUSE_S = 3, 0.2
KEY = "change/"


class ChangeStore:
    """Pieces of one rank of the changes of the turn that is being decided.

    Args:
        rank: of this process in its island.

    Attributes:
        notify: called in another thread with the hash of a piece after its fetch, also a vain one.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.links: MemberLinks | None = None
        self.notify: Callable[[str], None] = lambda digest: None
        self._changes: dict[str, bytes] = {}
        self._fetching: set[str] = set()

    def add(self, piece: bytes) -> str:
        """Keep this member's own piece; return its hash."""
        digest = hashlib.sha256(piece).hexdigest()
        self._changes[digest] = piece
        return digest

    def clear(self) -> None:
        """Forget the pieces of a turn that is decided."""
        self._changes.clear()

    def find(self, proposals: Sequence[TurnProposal]) -> list[bytes] | None:
        """Return this rank's pieces of the changes of proposals; None if one is missing."""
        found = [self._changes.get(self._piece_of(one)) for one in proposals]
        complete = [one for one in found if one is not None]
        return complete if len(complete) == len(found) else None

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return bytes of a piece for another member; called in other threads."""
        change = self._changes.get(key.removeprefix(KEY))
        return None if change is None else (len(change), change[offset : offset + length])

    def is_missing(self, proposal: TurnProposal) -> bool:
        """Return whether a piece is neither here nor on its way."""
        digest = self._piece_of(proposal)
        return digest not in self._changes and digest not in self._fetching

    def fetch(self, proposal: TurnProposal, ballot: Ballot) -> None:
        """Start to fetch this rank's piece of a member's change, unless it is here."""
        digest, names = self._piece_of(proposal), [proposal.seat.name]
        if ballot != ALL_VOTE:
            names.append(ballot[1])
        if not self.is_missing(proposal):
            return
        self._fetching.add(digest)
        work = threading.Thread(
            target=self._run, args=(digest, names), name="island-fetch", daemon=True
        )
        work.start()

    def _run(self, digest: str, names: Sequence[int]) -> None:
        for _ in range(TRIES):
            for name in names:
                if self._fetch_from(name, digest):
                    break
            if digest in self._changes:
                break
            time.sleep(PAUSE_S)
        self._fetching.discard(digest)
        self.notify(digest)

    def _piece_of(self, proposal: TurnProposal) -> str:
        """Return the hash of this rank's piece of a change; "" if the change has fewer pieces."""
        pieces = proposal.change.split(".")
        return pieces[self.rank] if self.rank < len(pieces) else ""

    def _fetch_from(self, name: int, digest: str) -> bool:
        with contextlib.suppress(OSError, ConfigError, KeyError):
            found = None if self.links is None else self.links.fetch(name, KEY + digest)
            if found is not None and hashlib.sha256(found).hexdigest() == digest:
                self._changes[digest] = found
                return True
        return False
