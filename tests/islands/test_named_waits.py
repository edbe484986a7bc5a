"""A member that waits for a majority says for whom, also where another member has the chair."""

from __future__ import annotations

import time
from typing import Any

import pytest
from member_drivers import QuietLinks, make_driver

from shoal.base.errors import ClusterError
from shoal.islands.changing import member_driver
from shoal.islands.membership.committed_turn import Seat
from shoal.islands.membership.turn_messages import Prepare


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Island 1 of four, whose change is offered; island 0 has the chair."""
    monkeypatch.setattr(member_driver, "LOST_S", 0.05)
    made, told = make_driver(1, 4, QuietLinks(), wait_s=0.5)
    found: Any = made
    found.told, found._had_seat = told, True
    found.window.open(10, 1.0)
    found.member.receive(Prepare(Seat(0, 1), 0, 1, (1, 0, 1)))
    return found


def watch(driver: Any, seconds: float) -> list[str]:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        driver._watch()
        driver.member.actions.clear()
        time.sleep(0.01)
    return list(driver.told)


def test_a_member_names_the_dead_without_whom_nobody_goes_on(driver: Any) -> None:
    driver.links.dead = (3,)
    assert watch(driver, 0.2) == [], "three of four go on"
    driver.links.dead = (2, 3)
    (line,) = watch(driver, 0.2)
    assert "waits for islands 2 and 3, at most 0.5 s" in line
    with pytest.raises(ClusterError, match="for islands 2 and 3; the last round is saved"):
        watch(driver, 5.0)


def test_a_member_that_trains_names_nobody(driver: Any) -> None:
    driver.window.close(10, committed=False)
    driver.links.dead = (2, 3)
    assert watch(driver, 0.2) == []
    driver.window.open(10, 1.0)
    assert len(watch(driver, 0.2)) == 1


def test_a_short_silence_names_nobody_and_other_names_are_a_line(driver: Any) -> None:
    driver.links.dead = (2, 3)
    watch(driver, 0.02)
    driver.links.dead = ()
    assert watch(driver, 0.1) == []
    driver._note_wait((0, 2, 3))
    driver._note_wait((2, 3))
    driver._note_wait((0, 2, 3))
    assert [line.split("waits for ")[1] for line in driver.told] == [
        "islands 0, 2 and 3, at most 0.5 s",
        "islands 2 and 3, at most 0.5 s",
    ]
