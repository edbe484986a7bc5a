"""Bytes of the changes of a turn: the own one, and those fetched from other members.

A change is fetched as soon as somebody names it, from its member or from the chair, which has all
that it offers. Its SHA-256 is its name, so altered bytes never count.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.base.errors import ConfigError
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.membership.committed_turn import TurnProposal
from shoal.islands.membership.turn_messages import ALL_VOTE, Ballot, Offer, Promise, Propose

TRIES, PAUSE_S = 3, 0.2
KEY = "change/"


class ChangeStore:
    """Changes of the turn that is being decided.

    Args:
        notify: called in another thread with the name of a change after its fetch, also a vain one.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.links: MemberLinks | None = None
        self._notify = notify
        self._changes: dict[str, bytes] = {}
        self._fetching: set[str] = set()

    def add(self, change: bytes) -> str:
        """Keep the own change; return its name."""
        digest = hashlib.sha256(change).hexdigest()
        self._changes[digest] = change
        return digest

    def clear(self) -> None:
        """Forget the changes of a turn that is decided."""
        self._changes.clear()

    def find(self, proposals: Sequence[TurnProposal]) -> list[bytes] | None:
        """Return the changes of proposals; None if one is missing."""
        found = [self._changes.get(one.change) for one in proposals]
        complete = [one for one in found if one is not None]
        return complete if len(complete) == len(found) else None

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return bytes of a change for another member; called in other threads."""
        change = self._changes.get(key.removeprefix(KEY))
        return None if change is None else (len(change), change[offset : offset + length])

    def fetch_announced(self, message: Any) -> None:
        """Fetch the changes that a message names: a merge will need them."""
        if isinstance(message, Propose | Promise) and message.proposal is not None:
            self.fetch(message.proposal, ALL_VOTE)
        elif isinstance(message, Offer):
            for one in message.proposals:
                self.fetch(one, message.ballot)

    def fetch(self, proposal: TurnProposal, ballot: Ballot) -> None:
        """Begin to fetch a change that is not here."""
        digest, names = proposal.change, [proposal.seat.name]
        if ballot != ALL_VOTE:
            names.append(ballot[1])
        if digest in self._changes or digest in self._fetching:
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
        self._notify(digest)

    def _fetch_from(self, name: int, digest: str) -> bool:
        with contextlib.suppress(OSError, ConfigError, KeyError):
            found = None if self.links is None else self.links.fetch(name, KEY + digest)
            if found is not None and hashlib.sha256(found).hexdigest() == digest:
                self._changes[digest] = found
                return True
        return False
