"""A transfer that gloo forgets is not waited for until its deadline: somebody asks who is there."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.fabric.islands import inter_island_links
from shoal.fabric.islands.heartbeat import IslandLost
from shoal.fabric.islands.inter_island_links import Deadline, IslandConnections, PendingLinkExchange

DEADLINE_S = 5.0


class Forgotten:
    """A transfer of which nobody is ever told, until its own limit is over."""

    def wait(self, limit: timedelta) -> None:
        time.sleep(limit.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


class Closed:
    """A group whose connection to one member is closed: whatever is posted there fails at once."""

    def __init__(self, gone: int) -> None:
        self.gone, self.asked = gone, []

    def send(self, _tensors: list[torch.Tensor], member: int, _tag: int) -> None:
        self.asked.append(member)
        if member == self.gone:
            raise RuntimeError("connection closed by peer")


class Hears:
    """A pulse of three islands that blames the one of which it was told."""

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}

    def blame(self, members: Any, name: str) -> tuple[tuple[int, ...], str]:
        return (2,), "silent"

    def report_given_up(self, islands: tuple[int, ...], words: str) -> None:
        """Nobody is there to be told."""


def test_a_transfer_that_was_forgotten_ends_at_the_first_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo does that once in some 140 kills: docs/lab-log.md, "A closed connection"."""
    monkeypatch.setattr(inter_island_links, "LOOK_S", 0.05)
    group: Any = Closed(gone=2)
    pulse: Any = Hears()
    here = IslandConnections(dist.HashStore(), pulse, range(3), 0, "all")
    work: Any = Forgotten()
    nothing = torch.empty(0, dtype=torch.uint8)
    with (
        pytest.raises(IslandLost, match="island 2: silent") as lost,
        here.deadline_scope("an exchange", DEADLINE_S) as deadline,
    ):
        here.wait(PendingLinkExchange(work, nothing, nothing, group), deadline)
    assert group.asked == [1, 2]
    assert lost.value.after_s < DEADLINE_S, "it waited for its deadline"


class Clock:
    """Time that only a transfer spends: a busy machine does not come between two questions."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, limit: timedelta) -> None:
        """As a transfer of which nobody is ever told."""
        self.now_s += limit.total_seconds()
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_a_deadline_ends_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody is gone, a transfer that does not end still ends at its deadline."""
    group: Any = Closed(gone=-1)
    work: Any = Clock()
    monkeypatch.setattr(inter_island_links, "time", work)
    nothing = torch.empty(0, dtype=torch.uint8)
    here = IslandConnections(dist.HashStore(), None, range(2), 0, "all")
    with pytest.raises(inter_island_links._TransferFailed):
        here.wait(PendingLinkExchange(work, nothing, nothing, group), Deadline(0.3))
    assert group.asked == [1]
    assert work.now_s == pytest.approx(0.3, abs=2 * inter_island_links.LEAST_S)
