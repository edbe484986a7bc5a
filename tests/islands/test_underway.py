"""Samples of steps that an island takes while its message travels: used once, by the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.islands.stream import Span, Stream
from shoal.trainer.rounds import Rounds


def closed(common: Any, *used: int) -> Any:
    """A round ends in which every island's last message had used so many of its samples."""
    rounds = SimpleNamespace(
        common=common,
        policy=SimpleNamespace(count=len(used)),
        _well=lambda merge, island: merge.committed,
    )
    ballots = [SimpleNamespace(used=one) for one in used]
    committed = any(used)
    Rounds._give_back(rounds, SimpleNamespace(ballots=ballots, committed=committed))
    return common


def dealt(stream: Stream, underway: Any = ()) -> Any:
    """12 samples for each of two islands."""
    after, spans = stream.deal([12, 12])
    return SimpleNamespace(stream=after, dealt=list(spans), underway=list(underway))


def test_samples_on_the_way_are_not_dealt_again() -> None:
    first = closed(dealt(Stream()), 9, 9)
    assert first.stream == Stream(24)
    assert first.underway == [(Span(9, 12),), (Span(21, 24),)]
    second = closed(dealt(first.stream, first.underway), 9, 12)
    assert second.stream == Stream(48)
    assert second.underway == [(Span(33, 36),), ()]


def test_a_refused_island_loses_what_was_on_the_way_too() -> None:
    """Its weights are overwritten: the round's samples return, and those that would come with it."""
    first = closed(dealt(Stream()), 9, 9)
    second = closed(dealt(first.stream, first.underway), 9, 0)
    assert second.stream == Stream(36, (Span(21, 24),))
    assert second.underway == [(Span(33, 36),), ()]
    gone = closed(dealt(first.stream, first.underway), 0, 0)
    assert gone.stream == Stream(21, (Span(9, 12),))
    assert gone.underway == [(), ()]
