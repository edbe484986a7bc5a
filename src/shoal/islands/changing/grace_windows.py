"""Windows for absent members: when a member has waited long enough for the others.

    all are awaited      what past rounds teach (`peer_deadline.py`), at most `wait_s`
    all absent are dead  DEAD_S: nobody listens at their addresses, or new processes do
    in a ballot          RETRY_S, twice as long at each further attempt
    which member first   the first of those that live at once, each next one CHAIR_S later

Only the length of a wait is decided here; the protocol decides what a late member misses.
"""

from __future__ import annotations

import time

from shoal.fabric.islands.member_links import MemberLinks
from shoal.islands.membership.committed_turn import CommittedTurn
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.turn_messages import ALL_VOTE
from shoal.islands.peer_deadline import PeerDeadline

CHAIR_S, DEAD_S, AGAIN_S = 1.0, 0.2, 0.5
RETRY_S, MOST_DOUBLED = 5.0, 6


class GraceWindow:
    """Time window in which a member waits for the changes of the others.

    Args:
        wait_s: longest window.

    Attributes:
        moved_s: when something last happened in this turn.
        offered_s: when the own change was offered; None: not yet.
    """

    def __init__(self, patience: PeerDeadline, wait_s: float) -> None:
        self.patience, self.wait_s = patience, wait_s
        self.moved_s = time.monotonic()
        self.offered_s: float | None = None
        self._window_s, self._dead_since_s = RETRY_S, 0.0

    def open(self, size_bytes: int, compute_s: float) -> None:
        """Open the window; its length follows from the size of a change and the compute time.

        Args:
            compute_s: seconds of the own inner steps of this turn.
        """
        self.offered_s = self.moved_s = time.monotonic()
        learnt_s = self.patience.deadline_s(size_bytes, compute_s)
        self._window_s = max(RETRY_S, min(learnt_s, self.wait_s))

    def close(self, size_bytes: int, *, committed: bool) -> None:
        """End the turn, and learn from it.

        Args:
            committed: the changes of all members came, and counted or were refused. A turn that
                ended without one lasted as long as this window, and would make the next far longer.
        """
        if self.offered_s is not None and committed:
            self.patience.record_exchange(time.monotonic() - self.offered_s, size_bytes)
        self.offered_s = None
        self.restart()

    def restart(self) -> None:
        """Restart the window, since something happened in this turn."""
        self.moved_s, self._dead_since_s = time.monotonic(), 0.0

    def is_over(
        self, member: IslandMember, fact: CommittedTurn, links: MemberLinks, *, waits: bool
    ) -> bool:
        """Return whether the member has waited long enough.

        Args:
            waits: too few members answered before; further attempts follow at AGAIN_S.
        """
        idle_s = time.monotonic() - self.moved_s
        if len(fact.trainers()) < member.least:
            return bool(member.joiners) and idle_s >= AGAIN_S
        if self.offered_s is None and member.promised == ALL_VOTE:
            return False  # it trains: nobody is late
        return idle_s >= self._late_s(member, fact, links, waits=waits)

    def _late_s(
        self, member: IslandMember, fact: CommittedTurn, links: MemberLinks, *, waits: bool
    ) -> float:
        """Return the seconds without news after which the window ends."""
        now_s, gone = time.monotonic(), links.gone(fact.seats)
        living = [name for name in fact.names() if name not in gone]
        place = living.index(member.seat.name) if member.seat.name in living else 0
        window_s, absent = _retry_s(member), list_missing(member, fact)
        if member.chair is not None:
            place, gone = 0, links.gone(member.chair.voters or fact.seats)
        elif member.promised != ALL_VOTE:
            absent, gone = {member.promised[1]}, links.gone([member.promised[1:]])
        else:
            window_s = self._window_s
            if len(member.proposals) == len(fact.seats):
                absent &= gone  # one that died with its vote is enough
        if not absent or not absent <= gone:
            self._dead_since_s = 0.0
            return window_s + CHAIR_S * place
        self._dead_since_s = self._dead_since_s or now_s
        if now_s - self._dead_since_s < DEAD_S + CHAIR_S * place:
            return window_s + CHAIR_S * place
        return AGAIN_S if waits else 0.0


def list_missing(member: IslandMember, fact: CommittedTurn) -> set[int]:
    """Return the members for whose next message this one waits."""
    names, chair = set(fact.names()), member.chair
    if chair is None:
        return names - set(member.proposals) or names - set(member.votes)
    if not chair.voters:
        return set(chair.missing())
    return {seat.name for seat in chair.voters} - chair.votes - chair.objections


def _retry_s(member: IslandMember) -> float:
    """Return the window of a ballot, which doubles with each attempt."""
    return float(RETRY_S * 2 ** min(max(member.promised[0] - 1, 0), MOST_DOUBLED))
