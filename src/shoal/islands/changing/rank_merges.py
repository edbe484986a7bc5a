"""Merges of an island's ranks: rank 0 commands, and every rank merges its units.

    rank 0     the driver's thread: `fetch`, `merge_if_here`, `apply`, `end` send a command first
    others     a thread in `follow`, which executes rank 0's commands
    merge      all ranks have their units of all changes? ─→ products, step and digest of all ranks

Both sides use the group of `ChangeMerge`, which no other thread uses meanwhile. A rank that dies
ends the island: the others of it see a closed connection, and the other islands go on without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from shoal.islands.changing.change_merge import ChangeMerge, MergedChanges
from shoal.islands.changing.change_store import ChangeStore
from shoal.islands.membership.committed_turn import TurnProposal
from shoal.islands.membership.message_json import decode_message, encode_message
from shoal.islands.membership.turn_messages import Ballot, Merge

IDLE_S, MERGES = 5.0, 4
"""Seconds after which rank 0 sends a command that does nothing: a dead rank is noticed then ·
newest merges of a rank that its training thread may still ask for."""

END = "end"


class RankMerges:
    """One rank's part of an island's merges.

    Attributes:
        changes: this rank's units of the changes.
    """

    def __init__(self, merge: ChangeMerge) -> None:
        self.merge, self.inner = merge, merge.inner
        self.changes = ChangeStore(merge.units, merge.unit_bytes, self.inner.rank, self.inner.size)
        self._merged: dict[str, MergedChanges] = {}
        self._commanded_s = time.monotonic()

    # rank 0

    def fetch(self, proposals: Sequence[TurnProposal], ballot: Ballot) -> None:
        """Begin to fetch the units of changes on all ranks."""
        missing = tuple(one for one in proposals if self.changes.is_missing(one))
        if missing:
            self._command("fetch", encode_message(missing), list(ballot), self._addresses())

    def merge_if_here(self, asked: Merge) -> MergedChanges | None:
        """Merge changes if every rank has its units of them, else return None."""
        if self.changes.find(asked.proposals) is None:
            return None
        given = encode_message(asked.proposals), list(asked.ballot), self._addresses()
        found: MergedChanges | None = self._command("merge", *given)
        return found

    def apply(self, weights: str | None) -> tuple[str, MergedChanges | None]:
        """End a turn on all ranks, and forget its changes.

        Args:
            weights: hash of the committed weights; None: this island has to heal.

        Returns:
            The digest of the weights here, "" if it has to heal; what this rank merged, None if
            nothing.
        """
        found: tuple[str, MergedChanges | None] = self._command("apply", weights)
        return found

    def notice_lost_ranks(self) -> None:
        """Send a command that does nothing if none was sent for long.

        Raises:
            RuntimeError: of torch, if a rank is lost.
        """
        if time.monotonic() - self._commanded_s > IDLE_S:
            self._command("idle")

    def end(self) -> None:
        """End the other ranks' `follow`."""
        if self.inner.size > 1:
            self.inner.broadcast_json([END])

    # the other ranks

    def follow(self) -> None:
        """Execute rank 0's commands until it ends."""
        while True:
            kind, *given = self.inner.broadcast_json(None)
            if kind == END:
                return
            self._execute(kind, *given)

    # all ranks

    def find_merged(self, weights: str) -> MergedChanges | None:
        """Return a recent merge of this rank that gave these weights."""
        return self._merged.get(weights)

    def _command(self, kind: str, *given: Any) -> Any:
        self._commanded_s = time.monotonic()
        if self.inner.size > 1:
            self.inner.broadcast_json([kind, *given])
        return self._execute(kind, *given)

    def _execute(self, kind: str, *given: Any) -> Any:
        if kind == "apply":
            return self._apply(*given)
        if kind not in ("fetch", "merge"):
            return None
        proposals: tuple[TurnProposal, ...] = decode_message(given[0])
        self._learn(given[2])
        units = self.changes.find(proposals)
        for one in proposals if units is None else ():
            self.changes.fetch(one, tuple(given[1]))
        if kind == "merge" and self.inner.all_true(units is not None) and units is not None:
            return self.merge.merge(proposals, units)
        return None

    def _apply(self, weights: str | None) -> tuple[str, MergedChanges | None]:
        self.changes.clear()
        if weights is None:  # the training threads may be loading other weights
            self.inner.all_true(True)
            return "", None
        merged = self.merge.commit(weights)
        if merged is not None:
            self._merged[weights] = merged
            for old in [*self._merged][:-MERGES]:
                del self._merged[old]
        return self.merge.digest(), merged

    def _addresses(self) -> dict[int, str]:
        """Return the addresses of the members' first ranks, if other ranks have to learn them."""
        links = self.changes.links
        return {} if links is None or self.inner.size == 1 else dict(links.addresses)

    def _learn(self, addresses: dict[str, str]) -> None:
        """Note where the first ranks of the other members listen."""
        links = self.changes.links
        if links is None or not self.inner.rank:
            return
        for name, address in addresses.items():
            if int(name) != links.name:
                links.addresses[int(name)] = address
