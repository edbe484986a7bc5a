"""When a member has waited long enough for the others: dead, silent, dead after its proposal, too few."""

from __future__ import annotations

import pytest

from shoal.islands.changing import grace_windows
from shoal.islands.changing.grace_windows import GraceWindow, list_missing
from shoal.islands.membership.committed_turn import Seat, TurnProposal, start_session
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import needs_common_start
from shoal.islands.membership.turn_messages import Hello, Propose
from shoal.islands.peer_deadline import PeerDeadline

SEATS = tuple(Seat(name, 1) for name in range(3))
FACT = start_session(0, None, SEATS, 4)


class Links:
    """Which processes are dead, and which of them answer as new ones."""

    def __init__(self, dead: set[int], again: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.dead, self.again = dead, again

    def gone(self, seats) -> set[int]:  # type: ignore[no-untyped-def]
        return {name for name, boot in seats if name in self.dead and boot == 1}

    def restarted(self, seats) -> set[int]:  # type: ignore[no-untyped-def]
        return self.gone(seats) & self.again


class Clock:
    """A monotonic clock that a test moves."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(grace_windows, "time", found)
    return found


def waiting(name: int, proposed: tuple[int, ...]) -> tuple[IslandMember, GraceWindow]:
    """A member that has proposed, and heard the proposals of others."""
    member = IslandMember(SEATS[name], FACT, (0, 1, 2), 4)
    window = GraceWindow(PeerDeadline(), 60.0)
    window.open(1000, 1.0)
    member.trained("own", 8, 4)
    for other in proposed:
        proposal = TurnProposal(SEATS[other], f"{other}", 8, 4)
        member.receive(Propose(SEATS[other], 0, 1, proposal))
    return member, window


def over_after_s(
    clock: Clock, member: IslandMember, window: GraceWindow, links: Links, most_s: float = 90.0
) -> float:
    """Seconds until the window is over, looked at as the driver does."""
    began_s = clock.now_s
    while not window.is_over(member, FACT, links, waits=False):  # type: ignore[arg-type]
        clock.now_s += 0.05
        assert clock.now_s < began_s + most_s
    return clock.now_s - began_s


def test_the_dead_are_not_awaited_and_one_member_takes_the_chair(clock: Clock) -> None:
    assert over_after_s(clock, *waiting(0, (1,)), Links({2})) == pytest.approx(0.2, abs=0.1)
    assert over_after_s(clock, *waiting(1, (0,)), Links({2})) == pytest.approx(1.2, abs=0.1)
    assert over_after_s(clock, *waiting(1, (2,)), Links({0})) == pytest.approx(0.2, abs=0.1)


def test_a_slow_member_is_awaited_though_another_is_dead(clock: Clock) -> None:
    """Nothing is known of past rounds, so the window is the longest that is allowed."""
    assert over_after_s(clock, *waiting(0, ()), Links({2})) == pytest.approx(60.0, abs=0.1)
    assert over_after_s(clock, *waiting(1, (2,)), Links(set())) == pytest.approx(61.0, abs=0.1)


def test_one_that_died_after_its_proposal_is_not_awaited(clock: Clock) -> None:
    """Its vote will not come, and the vote of all needs it."""
    member, window = waiting(0, (1, 2))
    assert list_missing(member, FACT) == {0, 1, 2}
    assert over_after_s(clock, member, window, Links({2})) == pytest.approx(0.2, abs=0.1)


def test_nobody_is_late_while_this_member_trains(clock: Clock) -> None:
    member = IslandMember(SEATS[0], FACT, (0, 1, 2), 4)
    window = GraceWindow(PeerDeadline(), 60.0)
    clock.now_s += 1e6
    assert not window.is_over(member, FACT, Links({1, 2}), waits=False)  # type: ignore[arg-type]


def test_too_few_members_wait_for_one_that_asks(clock: Clock) -> None:
    member = IslandMember(SEATS[0], FACT, (0, 1, 2), 4, least=4)
    window = GraceWindow(PeerDeadline(), 60.0)
    clock.now_s += 1e6
    assert not window.is_over(member, FACT, Links(set()), waits=True)  # type: ignore[arg-type]
    member.receive(Hello(Seat(3, 1), -1, -1))
    assert window.is_over(member, FACT, Links(set()), waits=True)  # type: ignore[arg-type]


def test_a_common_start_is_for_those_that_no_vote_helps() -> None:
    """Of three, one that never restarted is too few for a ballot; of two, one is enough."""
    member = IslandMember(SEATS[0], FACT, (0, 1, 2), 4)
    assert needs_common_start(member, {1, 2}, Links({1, 2}, {1, 2}))
    assert not needs_common_start(member, {1, 2}, Links({1, 2}, {1}))
    two = start_session(0, None, SEATS[:2], 4)
    left = IslandMember(SEATS[0], two, (0, 1), 4)
    assert not needs_common_start(left, {1}, Links({1}, {1}))
