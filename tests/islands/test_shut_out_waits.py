"""An island that the others refuse: each of its waits ends with a stop, and it says who left it out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from member_drivers import QuietLinks, make_driver

from shoal.islands.changing.lost_members import describe_left_out
from shoal.islands.changing.member_driver import MemberDriver
from shoal.islands.changing.turn_records import AppliedTurn, join_turns
from shoal.islands.membership.committed_turn import (
    CommittedTurn,
    Seat,
    TurnProposal,
    commit_turn,
    start_session,
)
from shoal.trainer.islands.member_rounds import MemberRounds
from shoal.trainer.islands.member_state import MemberCheckpoints

SEATS = tuple(Seat(name, 1) for name in range(3))
START = start_session(0, None, SEATS, 4)


def turn_of(*names: int) -> CommittedTurn:
    """Return the turn after the first, which these members merged."""
    seats = [SEATS[name] for name in names]
    proposals = [TurnProposal(seat, "x", 8, 3) for seat in seats]
    return commit_turn(START, proposals, "w", tuple(seats), 4)


class Links(QuietLinks):
    """Connections of island 0, with a file that takes long."""

    def __init__(self, **who: set[int]) -> None:
        super().__init__(**who)
        self.asked: list[str] = []

    def fetch(self, name: int, key: str, interrupted: Callable[[], bool] = lambda: False) -> bytes:
        self.asked.append(key)
        if name in self._refusing:
            raise PermissionError("refused")
        if "/round/" in key:
            return b"4"
        until_s = time.monotonic() + 5  # a large file, in pieces
        while time.monotonic() < until_s:
            if interrupted():
                raise InterruptedError
            time.sleep(0.01)
        return b""


@pytest.mark.parametrize("refusing", [{1, 2}, {1}], ids=["refused by all", "in a long copy"])
def test_a_stop_ends_the_wait_for_another_islands_state(tmp_path: Path, refusing: set[int]) -> None:
    run = SimpleNamespace(recorder=SimpleNamespace(folder=tmp_path), stop_wanted=False)
    joined = SimpleNamespace(policy=SimpleNamespace(period=2))
    ranks = SimpleNamespace(is_first=True, broadcast_json=lambda found: found)
    checkpoints = MemberCheckpoints(run, joined, ranks, 3.0)  # type: ignore[arg-type]
    links = Links(refusing=refusing)
    checkpoints.links = links  # type: ignore[assignment]
    stop = threading.Timer(0.2, lambda: setattr(run, "stop_wanted", True))
    stop.start()
    began_s = time.monotonic()
    assert not checkpoints.heal(turn_of(1, 2))
    assert time.monotonic() - began_s < 2.5
    assert links.asked
    assert not [path for path in (tmp_path / "checkpoints").glob("*") if path.is_dir()]
    stop.join()


def driver_of(links: QuietLinks) -> MemberDriver:
    return make_driver(0, 3, links)[0]


def test_no_turn_is_awaited_of_islands_that_refuse_this_one() -> None:
    assert driver_of(Links()).awaits == ()
    assert driver_of(Links(refusing={2})).awaits == (), "two of three decide"
    assert driver_of(Links(refusing={1, 2})).awaits == (1, 2)
    assert driver_of(Links(refusing={1}, removed={2})).awaits == (1, 2)


@pytest.mark.parametrize(
    ("links", "why"),
    [
        (Links(), "its change came too late"),
        (Links(refusing={1, 2}), "the key of this island is not in the list of islands 1 and 2"),
        (Links(removed={2}), "this island shut island 2 out, and others still list its key"),
    ],
)
def test_an_island_that_goes_back_says_who_left_it_out(links: Links, why: str) -> None:
    fact, driver = turn_of(1, 2), driver_of(links)
    member, given = driver.member, (SEATS, driver.links)
    text = describe_left_out(member, fact, *given)
    assert text.startswith(f"by islands 1 and 2: {why}")
    assert describe_left_out(member, turn_of(0, 2), *given) == ""
    turn = AppliedTurn(fact, None, True, True, {}, {}, text)
    assert join_turns(turn, AppliedTurn(fact, None, False, True, {}, {})).left_out == text
    told: list[str] = []
    rounds: Any = MemberRounds.__new__(MemberRounds)
    rounds.index, rounds.common = 0, None
    rounds.run = SimpleNamespace(recorder=SimpleNamespace(notice=told.append))
    assert rounds._install(replace(turn, train=False), START), "it has no seat: it does not heal"
    (line,) = told
    assert line.startswith(f"island 0 was left out of round 0 by islands 1 and 2: {why}")
    assert line.endswith("do not count, and it loads the state of another island")
