"""An island with an empty disk beside a run that goes on: it takes part there, and begins no other one."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from member_drivers import QuietLinks, make_driver

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.layouts.island_options import IslandsPolicy
from shoal.islands.changing.member_driver import ASK_S, MemberDriver
from shoal.islands.changing.member_waits import ResumeCommand, describe_wait
from shoal.islands.changing.session_start import LISTEN_S, SessionStart
from shoal.islands.membership.committed_turn import (
    Seat,
    TurnProposal,
    commit_turn,
    start_session,
)
from shoal.islands.membership.island_member import IslandMember
from shoal.islands.membership.session_meeting import ArrivalReport
from shoal.islands.membership.turn_messages import Apply, Hello, Send
from shoal.islands.peer_deadline import FIRST_S, PeerDeadline

A, B = "10.0.0.1:29400", "10.0.0.2:29400"
OWN, OTHER = Seat(0, 5), Seat(1, 4)


class Dialed(QuietLinks):
    """Connections of island 0, which was given its own address alone."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses, self.dialing = {0: A}, dict[int, str]()
        self.sent: list[tuple[int, str]] = []

    def send(self, names: Any, message: Any) -> None:
        self.sent += [(name, message[0]) for name in names]

    def dialers(self) -> dict[int, str]:
        return self.dialing

    def learn(self, name: int, address: str) -> None:
        self.addresses[name] = address


@pytest.fixture
def driver() -> Any:
    """Island 0 with an empty disk, started by its first command: islands.count=1."""
    told: list[str] = []
    merges: Any = SimpleNamespace(changes=SimpleNamespace())
    found: Any = MemberDriver(
        IslandMember(OWN, None, (0,), 4),
        merges,
        PeerDeadline(),
        arrival=ArrivalReport(OWN, None, "w"),
        count=1,
        wait_s=60.0,
        resume=ResumeCommand("shoal train --resume runs/x"),
        settings={},
        describe=lambda other, name: "",
        provide_state=lambda key, offset, length: None,
        tell=told.append,
    )
    found.links, found.told = Dialed(), told
    found.session_start = SessionStart(found.links, told.append)
    return found


def has_begun(driver: Any, *, listened: bool = True) -> bool:
    """Whether island 0 begins a run when it greets the others once more."""
    driver.session_start.opened_s -= (LISTEN_S + 1.0) * listened
    driver._greet()
    for action in driver.member.actions:
        if isinstance(action, Send):
            driver._perform_one(action)
    return bool(driver.member.fact is not None)


def test_an_island_that_is_alone_listens_before_it_begins(driver: Any) -> None:
    assert not has_begun(driver, listened=False)
    assert has_begun(driver)


def test_an_island_that_others_dial_asks_them_for_a_seat(driver: Any) -> None:
    driver.links.dialing = {1: B}
    assert not has_begun(driver, listened=False)
    assert not driver.told, "it may be a start that was not reported yet"
    assert not has_begun(driver)
    assert (1, "Hello") in driver.links.sent
    (line,) = driver.told
    assert line.startswith(f"island 1 at {B} runs already, and dials this island")
    assert driver.awaits == (1,)
    driver.links.dialing = {}
    assert has_begun(driver), "that one has ended"


def test_an_island_that_starts_too_is_no_running_one(driver: Any) -> None:
    """Monday has come early: both start at once, and the other one waits for this one."""
    driver.links.dialing = {1: B}
    driver._on_arrival(ArrivalReport(OTHER, None, "w", None, (OWN, OTHER)))
    assert has_begun(driver)


def test_the_weights_of_another_disk_are_gone_on_from(driver: Any) -> None:
    """The other one lost its majority, and starts anew: it is no second run."""
    held = start_session(9, None, (Seat(0, 1), Seat(1, 1)), 4)._replace(round=7, weights="x")
    driver.links.dialing = {1: B}
    driver._on_arrival(ArrivalReport(OTHER, held, "w", None, (OWN, OTHER)))
    assert driver.member.fact is not None
    assert (driver.member.fact.round, driver.member.fact.weights) == (7, "x")


def test_who_gets_no_seat_beside_a_run_reads_why(driver: Any) -> None:
    driver.links.dialing = {1: B}
    line = str(
        ClusterError(describe_wait(driver.member, (1,), (), 60.0, driver.links, driver.resume))
    )
    assert "for island 1, whose run goes on: it dials this island, and gives it no seat" in line


def test_more_addresses_than_islands_are_a_count_that_was_forgotten() -> None:
    with pytest.raises(ConfigError, match=r"2 addresses.*try: islands\.count=2, which looks for"):
        IslandsPolicy(method="diloco", count=1, least=1, at=f"{A},{B}").resolved()


class Asking(QuietLinks):
    """Connections that keep what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, str]] = []

    def send(self, names: Any, message: Any) -> None:
        self.sent += [(name, message[0]) for name in names]

    def is_unreached(self, name: int) -> bool:
        return False


@pytest.mark.parametrize("heals", [True, False])
def test_a_member_whose_lost_turn_left_it_out_asks_while_it_takes_weights(heals: bool) -> None:
    """It has a seat of the turn that it knows, and offers nothing, so no window of it ever ends."""
    links = Asking()
    driver, _ = make_driver(2, 3, links)
    applied: list[Apply] = []
    driver._apply = applied.append  # type: ignore[assignment]
    driver.is_healthy, driver._had_seat, driver.meeting = not heals, True, None
    driver._watch()
    driver._perform()
    assert not links.sent, "right after the turn there is nothing to ask"
    driver.window.moved_s = driver._greeted_s = time.monotonic() - ASK_S - 1.0
    for _ in range(2):
        driver._watch()
        driver._perform()
    assert links.sent == ([(0, "Hello"), (1, "Hello")] if heals else []), "once in ASK_S"
    fact = driver.member.fact
    assert fact is not None
    later = commit_turn(
        fact, [TurnProposal(seat, "x", 8, 3) for seat in fact.seats[:2]], "w", fact.seats[:2], 4
    )
    other = IslandMember(fact.seats[0], later, (0, 1, 2), 4)
    other.receive(Hello(fact.seats[2], fact.session, fact.turn + 1))
    (answer,) = (one for one in other.actions if isinstance(one, Send))
    driver._receive(answer.message)
    driver._perform()
    assert [one.fact for one in applied] == [later], "the answer is the turn that it missed"


@pytest.mark.parametrize("absent", [False, True])
def test_a_turn_that_ended_without_a_member_teaches_no_time(absent: bool) -> None:
    """It lasted as long as the window; a next window of some times that would pause the others."""
    driver, _ = make_driver(0, 3, QuietLinks())
    merges: Any = driver.merges
    merges.merge, merges.apply = SimpleNamespace(size_bytes=8), lambda weights: (weights, None)
    start = driver.member.fact
    assert start is not None
    driver._apply(Apply(start, False, True))
    driver.window.open(8, 0.1)
    driver.window.offered_s = time.monotonic() - 25.0
    came = start.seats[:2] if absent else start.seats
    proposals = [TurnProposal(seat, "x", 8, 3) for seat in came]
    driver._apply(Apply(commit_turn(start, proposals, "w", came, 4), False, True))
    learnt_s = driver.window.patience.deadline_s(8)
    assert learnt_s == FIRST_S if absent else 15.0 < learnt_s < FIRST_S
