"""Where samples go: dealt once, nothing lost, whatever is refused or crashes on the way."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from shoal.base.errors import BugError, CheckpointError
from shoal.base.plans.batches import cut_step
from shoal.islands.sample_ranges import (
    SampleRange,
    SampleStream,
    cut_steps,
    drop_consumed,
    inner_steps,
    split_ranges,
)


def positions(spans) -> list[int]:
    return [place for span in spans for place in range(span.start, span.stop)]


def test_period_1_is_data_parallelism() -> None:
    islands, batch = 3, 4
    stream = SampleStream(24)
    for _ in range(5):
        at = stream.cursor
        stream, dealt = stream.deal(stream.count_samples([1] * islands, batch, None))
        together = cut_step(at, None, islands * batch, batch)
        assert [spans for spans in dealt] == [(SampleRange(m.start, m.stop),) for m in together]


def test_open_ranges_go_first_in_the_order_of_islands() -> None:
    stream = SampleStream(100, (SampleRange(8, 10), SampleRange(20, 25)))
    after, dealt = stream.deal([4, 0, 4])
    assert dealt == (
        (SampleRange(8, 10), SampleRange(20, 22)),
        (),
        (SampleRange(22, 25), SampleRange(100, 101)),
    )
    assert after == SampleStream(101)
    assert after.return_unused(spans for hand in dealt for spans in hand) == stream


def test_no_rest_cuts_short_steps_for_ever() -> None:
    """A round of as many samples as steps × batch would leave 5 of them behind, round for round."""
    batch, epoch = 10, 95
    stream, lengths = SampleStream(), []
    for _ in range(6):
        steps = [4, 4]
        stream, dealt = stream.deal(stream.count_samples(steps, batch, epoch))
        cut = [cut_steps(spans, epoch, batch) for spans in dealt]
        assert [len(one) for one in cut] == steps
        assert stream.open == ()
        lengths += [stop - start for one in cut for start, stop in one]
    assert lengths.count(5) == 4
    assert lengths.count(10) == len(lengths) - 4


def test_a_step_straddles_neither_a_span_nor_an_epoch() -> None:
    spans = (SampleRange(0, 3), SampleRange(8, 14))
    assert cut_steps(spans, 10, 4) == [(0, 3), (8, 10), (10, 14)]
    assert cut_steps(spans, None, 4) == [(0, 3), (8, 12), (12, 14)]
    assert cut_steps((), 10, 4) == []


@pytest.mark.parametrize("seed", range(30))
def test_exactly_once_over_committed_rounds(seed: int) -> None:
    """Deals, rests, refusals, crashes and other numbers of islands, in any order."""
    draw = random.Random(seed)
    batch = draw.randint(1, 7)
    epoch = draw.choice([None, draw.randint(1, 60)])
    committed, longest = json.dumps(SampleStream().to_json()), 0
    used: set[int] = set()
    for _ in range(60):
        stream = SampleStream.from_json(json.loads(committed))
        islands = draw.randint(1, 5)
        speeds = [draw.choice([None, draw.uniform(0.05, 1.0)]) for _ in range(islands)]
        steps = inner_steps(draw.randint(1, 9), speeds)
        after, dealt = stream.deal(stream.count_samples(steps, batch, epoch))
        cut = [cut_steps(spans, epoch, batch) for spans in dealt]
        assert [len(one) for one in cut] == steps
        assert positions(span for hand in dealt for span in hand) == sorted(
            place for one in cut for start, stop in one for place in range(start, stop)
        )
        if draw.random() < 0.3:
            continue  # a crash: the next round begins at what was committed
        trained, rest = [], []
        for spans, own in zip(dealt, cut, strict=True):
            done = 0 if draw.random() < 0.2 else draw.randint(0, len(own))  # 0: refused
            consumed = sum(stop - start for start, stop in own[:done])
            trained += positions(split_ranges(spans, consumed)[0])
            rest += drop_consumed(spans, consumed)
        draw.shuffle(rest)
        stream = after.return_unused(rest)
        assert len(trained) == len(set(trained)), "used twice in a round"
        assert used.isdisjoint(trained), "used again"
        used.update(trained)
        longest = max(longest, len(stream.open))
        committed = json.dumps(stream.to_json())
        still_open = positions(stream.open)
        assert used.isdisjoint(still_open), "would be used again"
        assert len(used) + len(still_open) == stream.cursor > max(used, default=-1), "lost"
        assert all(
            a.stop < b.start for a, b in pairwise([*stream.open, SampleRange(stream.cursor, 0)])
        )
    assert used
    assert longest <= 20


def test_rests_merge_and_the_cursor_goes_back() -> None:
    stream = SampleStream(16, (SampleRange(2, 4),))
    assert stream.return_unused(
        [SampleRange(12, 16), SampleRange(4, 6), SampleRange(9, 9)]
    ) == SampleStream(12, (SampleRange(2, 6),))
    assert stream.return_unused([SampleRange(4, 16)]) == SampleStream(2)


def test_what_comes_back_twice_or_was_never_dealt_is_a_bug() -> None:
    stream = SampleStream(16, (SampleRange(2, 4),))
    with pytest.raises(BugError, match=r"samples 3 … 3 came back twice"):
        stream.return_unused([SampleRange(3, 5)])
    with pytest.raises(BugError, match=r"up to 19 came back, dealt are those before 16"):
        stream.return_unused([SampleRange(14, 20)])
    with pytest.raises(BugError, match=r"7 samples of spans that hold 6"):
        drop_consumed((SampleRange(0, 6),), 7)
    with pytest.raises(BugError, match=r"-1 samples"):
        drop_consumed((SampleRange(0, 6),), -1)


@pytest.mark.parametrize(
    "kept",
    [
        None,
        {"cursor": 5},
        {"cursor": "5", "open": []},
        {"cursor": True, "open": []},
        {"cursor": -1, "open": []},
        {"cursor": 5, "open": [[1]]},
        {"cursor": 5, "open": [[1, 2, 3]]},
        {"cursor": 5, "open": [[3, 3]]},
        {"cursor": 5, "open": [[1, 3], [3, 4]]},
        {"cursor": 5, "open": [[2, 5]]},
        {"cursor": 5, "open": [[2.0, 3]]},
        {"cursor": 5, "open": 7},
    ],
)
def test_a_damaged_place_is_told(kept: object) -> None:
    with pytest.raises(CheckpointError, match=r"place in the data is damaged: .*; a cursor and"):
        SampleStream.from_json(kept)


def test_steps_follow_speed() -> None:
    assert inner_steps(50, [4.0, 1.0, None, 0.01]) == [50, 12, 50, 1]
    assert inner_steps(50, [None, None]) == [50, 50]
    assert inner_steps(50, [0.0, 0.0]) == [50, 50]
    assert inner_steps(1, [3.0, 1.0]) == [1, 1]
