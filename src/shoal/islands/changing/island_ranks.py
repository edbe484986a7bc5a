"""Ranks of an island that comes and goes: rank 0 has the member, and gives each turn to all ranks.

    rank 0      MemberDriver: the protocol, messages, the merges' commands
    others      a thread that merges this rank's units, and a port that serves them
    a turn      wait_for_turn: of rank 0's driver, broadcast to the training threads of all ranks
    a change    offer: every rank keeps its units, rank 0 offers the hash of all their hashes

All methods but `holds_newer` of a single rank and `close` are collectives of the training threads.
An error of rank 0's driver is raised on all ranks.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import ClusterError, ConfigError, ShoalError
from shoal.fabric import World
from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.changing.change_store import KEY, hash_list
from shoal.islands.changing.member_driver import MemberDriver
from shoal.islands.changing.rank_merges import RankMerges
from shoal.islands.changing.turn_records import AppliedTurn, OfferedChange
from shoal.islands.membership.committed_turn import CommittedTurn
from shoal.islands.membership.message_json import decode_message, encode_message

END_S, LAST_WORDS_S = 30.0, 5.0


@dataclass(frozen=True)
class RankWork:
    """Measurements of a rank's round; rank 0's count for the island."""

    tokens: int
    used: int
    steps: int
    compute_s: float
    leaves: bool


class IslandRanks:
    """One rank of an island, as its training thread sees it.

    Args:
        world: of the island's ranks, on a group that only the training threads use.
        merges: of this rank.
        driver: of rank 0; None on the other ranks.

    Attributes:
        leaves: the island has said goodbye, as of the newest turn.
    """

    def __init__(self, world: World, merges: RankMerges, driver: MemberDriver | None) -> None:
        self.world, self.merges, self.driver = world, merges, driver
        self.leaves = self._is_closing = False
        self._links: MemberLinks | None = None
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._follow, name="island-rank", daemon=True)

    def start(self, links: MemberLinks) -> None:
        """Start the thread that runs the members' protocol."""
        self._links = links
        if self.driver is not None:
            self.driver.start(links)
            return
        self.merges.changes.links = links
        self._thread.start()

    def provide(self, key: str, offset: int, length: int) -> tuple[int, bytes] | None:
        """Return bytes of this rank's units to another member; called in other threads."""
        return self.merges.changes.provide(key, offset, length) if key.startswith(KEY) else None

    def wait_for_turn(self, interrupted: Callable[[], bool]) -> AppliedTurn | None:
        """Return the next committed turn on all ranks; None if rank 0 was interrupted.

        Raises:
            ShoalError: of rank 0's driver.
        """
        turn, failure = None, None
        if self.driver is not None:
            try:
                turn = self.driver.wait_for_turn(interrupted)
            except ShoalError as found:
                failure = found
            self.leaves = self.driver.member.leaves
        if self.world.size == 1:
            if failure is not None:
                raise failure
            return turn
        told = self.world.broadcast_json(_encode_turn(turn, failure, self.leaves))
        if told is not None and "failure" in told:
            if failure is not None:
                raise failure
            raise (ConfigError if told["is_config"] else ClusterError)(told["failure"])
        if told is None or self.driver is not None:
            return turn
        self.leaves = told["leaves"]
        fact: CommittedTurn = decode_message(told["fact"])
        return AppliedTurn(
            fact,
            self.merges.find_merged(fact.weights) if told["merged"] else None,
            told["heal"],
            told["train"],
            absent={int(name): why for name, why in told["absent"].items()},
            refused={int(name): why for name, why in told["refused"].items()},
        )

    def has_newer(self, fact: CommittedTurn) -> bool:
        """Return whether the members went on from a turn, the same on all ranks."""
        found = self.driver is not None and self.driver.has_newer(fact)
        return bool(self.world.broadcast_json(found)) if self.world.size > 1 else found

    @property
    def awaits(self) -> bool:
        """Return whether rank 0 waits for members without which nobody goes on."""
        return self.driver is not None and bool(self.driver.awaits)

    def offer(self, fact: CommittedTurn, units: Sequence[bytes], work: RankWork) -> None:
        """Offer this island's change of the turn after `fact`.

        Args:
            units: of this rank, of the encoded change.
        """
        told = self.world.gather_json([hashlib.sha256(unit).hexdigest() for unit in units])
        hashes = bytes.fromhex("".join(one for rank in told for one in rank))
        change, size_bytes = hash_list(hashes), sum(map(len, units))
        self.merges.changes.add(change, hashes, units)
        if self.driver is not None:
            given = change, work.tokens, work.used, work.steps, work.steps / work.compute_s
            offered = OfferedChange(*given, size_bytes, work.compute_s, work.leaves)
            self.driver.offer(fact, offered)

    def note_saved(self, fact: CommittedTurn) -> None:
        """Note that a turn is on this island's disk."""
        if self.driver is not None:
            self.driver.note_saved(fact)

    def note_healed(self, fact: CommittedTurn) -> None:
        """Note that the outer weights are those of a turn, and on disk."""
        if self.driver is not None:
            self.driver.note_healed(fact)

    def count_sent_bytes(self) -> int:
        """Return the bytes that others fetched from all ranks since the last call."""
        total = 0 if self._links is None else self._links.sent_bytes
        own, self._sent_bytes = total - self._sent_bytes, total
        return sum(self.world.gather_json(own))

    def finish(self, within_s: float) -> None:
        """End, once the other members have the last turn too, or `within_s` later."""
        if self.driver is not None:
            self.driver.finish(within_s)
            return
        self._is_closing = True
        self._thread.join(within_s + END_S)
        self.close()

    def close(self) -> None:
        """End this rank at once."""
        self._is_closing = True
        if self.driver is not None:
            self.driver.close()
        elif self._links is not None:
            self._links.close()

    def _follow(self) -> None:
        """Merge as rank 0 commands; without it this process ends, and with it the island."""
        try:
            self.merges.follow()
        except Exception:
            time.sleep(LAST_WORDS_S)  # the training thread may report the same loss better
            if not self._is_closing:
                sys.excepthook(*sys.exc_info())
                os._exit(ClusterError.exit_code)


def _encode_turn(turn: AppliedTurn | None, failure: ShoalError | None, leaves: bool) -> Any:
    """Return the JSON of a turn for the other ranks; None: rank 0 was interrupted."""
    if failure is not None:
        return {"failure": str(failure), "is_config": isinstance(failure, ConfigError)}
    if turn is None:
        return None
    return {
        "fact": encode_message(turn.fact),
        "merged": turn.merged is not None,
        "heal": turn.heal,
        "train": turn.train,
        "absent": turn.absent,
        "refused": turn.refused,
        "leaves": leaves,
    }
