"""Samples of steps that an island takes while its message travels: used once, by the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.islands.sample_ranges import SampleRange, SampleStream
from shoal.trainer.islands.island_loop import IslandRounds
from shoal.trainer.islands.island_state import CommonState


class Nothing:
    """In the place of what has no part in this."""

    def state(self) -> dict[str, Any]:
        return {}

    record = state


def test_a_save_after_a_discarded_round_says_that_the_weights_bring_nothing() -> None:
    """The rest of it is of the round that all hold; these weights were overwritten since."""
    nothing: Any = Nothing()
    common = CommonState(nothing, (), nothing, {}, 2, SampleStream(24), nothing, index=1)
    common.underway, common.since, common.round = (
        [(SampleRange(9, 12),), (SampleRange(21, 24),)],
        [9, 3],
        1,
    )
    common.keep()
    before = common.record()["islands"]
    assert (before["index"], before["since"], before["underway"]) == (
        1,
        [9, 3],
        [[[9, 12]], [[21, 24]]],
    )
    common.since, common.failures = [0, 0], 1
    after = common.record()["islands"]
    assert after == {**before, "since": [0, 0]}
    common.lost([1])
    assert common.stream == SampleStream(21)
    assert common.underway == [(SampleRange(9, 12),), ()]
    common.lost(range(2))
    assert common.stream == SampleStream(21, (SampleRange(9, 12),))


def test_an_older_checkpoint_brings_nothing_but_the_merged_weights() -> None:
    """It says neither whose it is nor what was on the way."""
    outer: Any = SimpleNamespace(weights={}, load=lambda tensors: None)
    quiet: Any = SimpleNamespace(load=lambda *kept: "", state=dict, record=dict)
    common = CommonState(outer, (), quiet, {}, 2, SampleStream(), quiet, index=1)
    old = CommonState(
        outer, (), quiet, {}, 2, SampleStream(24), quiet, index=1, since=[9, 3]
    ).record()
    for key in ("index", "underway", "since"):
        del old["islands"][key]
    common.load({}, old)
    assert (common.own, common.since, common.underway) == (False, [], [])
    assert common.stream == SampleStream(24)


def closed(common: Any, *used: int) -> Any:
    """A round ends in which every island's last message had used so many of its samples."""
    rounds = SimpleNamespace(
        common=common,
        policy=SimpleNamespace(count=len(used)),
        _is_merge_committed=lambda merge, island: merge.committed,
    )
    ballots = [SimpleNamespace(used=one) for one in used]
    committed = any(used)
    IslandRounds._return_samples(rounds, SimpleNamespace(ballots=ballots, committed=committed))
    return common


def dealt(stream: SampleStream, underway: Any = ()) -> Any:
    """12 samples for each of two islands."""
    after, spans = stream.deal([12, 12])
    return SimpleNamespace(stream=after, dealt=list(spans), underway=list(underway))


def test_samples_on_the_way_are_not_dealt_again() -> None:
    first = closed(dealt(SampleStream()), 9, 9)
    assert first.stream == SampleStream(24)
    assert first.underway == [(SampleRange(9, 12),), (SampleRange(21, 24),)]
    second = closed(dealt(first.stream, first.underway), 9, 12)
    assert second.stream == SampleStream(48)
    assert second.underway == [(SampleRange(33, 36),), ()]


def test_a_refused_island_loses_what_was_on_the_way_too() -> None:
    """Its weights are overwritten: the round's samples return, and those that would come with it."""
    first = closed(dealt(SampleStream()), 9, 9)
    second = closed(dealt(first.stream, first.underway), 9, 0)
    assert second.stream == SampleStream(36, (SampleRange(21, 24),))
    assert second.underway == [(SampleRange(33, 36),), ()]
    gone = closed(dealt(first.stream, first.underway), 0, 0)
    assert gone.stream == SampleStream(21, (SampleRange(9, 12),))
    assert gone.underway == [(), ()]
