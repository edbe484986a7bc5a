"""Timelines and step-throughs in the terminal: true places, at most 100 columns, plain when piped."""

from __future__ import annotations

import io
import re

import pytest
from terminals import Terminal

from shoal.base.plans.timeline import MemorySample, Timeline, TimelineSpan
from shoal.teach.drawings.timeline_rows import group_name, make_rows, make_ticks, rank_groups
from shoal.teach.drawings.timeline_text import print_timelines, timeline_lines
from shoal.teach.drawings.walk_text import print_walk, walk_lines
from shoal.teach.puzzles import puzzle_timeline
from shoal.teach.walks import collectives_walk, zero_walk
from shoal.teach.walks.fsdp_walk import fsdp
from shoal.teach.walks.pipelines_walk import PipelineCase, pipeline


def text(timelines: list[Timeline], width: int = 100) -> list[str]:
    return [line.plain for line in timeline_lines(timelines, width)]


def test_one_f_one_b_drawn_by_hand() -> None:
    """p = 2, m = 2, F = 1, B = 2: rank 0 waits from 2 to 4, then from 6 to 7."""
    lines = text([pipeline("1f1b", PipelineCase(2, 2))])
    assert [line[:6] for line in lines[2:4]] == ["rank 0", "rank 1"]
    per = 6
    assert (
        lines[2][10:]
        == "F0----F1----" + "." * 2 * per + "B0" + "-" * 10 + "." * per + "B1" + "-" * 10
    )
    assert (
        lines[3][10:]
        == "." * per + "F0----" + "B0" + "-" * 10 + "F1----" + "B1" + "-" * 10 + "." * 2 * per
    )


@pytest.mark.parametrize(
    "line",
    [
        pipeline("gpipe", PipelineCase(4, 64)),
        pipeline("1f1b", PipelineCase(8, 24)),
        pipeline("interleaved", PipelineCase(4, 8, chunks=4)),
        pipeline("zbv", PipelineCase(6, 16)),
        pipeline("dualpipe", PipelineCase(8, 20)),
        pipeline("1f1b", PipelineCase(3, 7, 0.123, 0.456, 0.0789)),
        puzzle_timeline(6, "reference"),
        puzzle_timeline(7, "reference"),
        *[
            w.timeline
            for w in (collectives_walk.ring(16), collectives_walk.tree(9), fsdp(8, 2))
            if w.timeline
        ],
    ],
    ids=lambda line: line.title[:24],
)
def test_fits_in_100_columns_and_keeps_places(line: Timeline) -> None:
    lines = text([line])
    assert max(map(len, lines)) <= 100
    axis = lines[1]
    margin = axis.index("0", axis.index(","))
    drawn = [one for one in lines[2:] if re.match(r"(ranks? |link)", one)][: len(make_rows(line))]
    columns = max(len(one) for one in drawn) - margin
    for row, one in zip(make_rows(line), drawn, strict=True):
        for column, sign in list(enumerate(one[margin:]))[::3]:
            middle_s = (column + 0.5) / columns * line.end_s
            busy = any(s.start_s <= middle_s < s.end_s for s in row.spans)
            near = any(
                abs(edge - middle_s) <= line.end_s / columns
                for s in row.spans
                for edge in (s.start_s, s.end_s)
            )
            assert (sign != ".") == busy or near, (one, column)


def test_piped_is_plain_and_a_terminal_has_colours() -> None:
    line, pipe = pipeline("zbv", PipelineCase(2, 4)), io.StringIO()
    print_timelines([line], pipe)
    assert "\x1b" not in pipe.getvalue()
    drawn = "\n".join(one for one in pipe.getvalue().splitlines() if one.startswith("rank"))
    assert drawn.isascii()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        terminal = Terminal()
        print_timelines([line], terminal)
        print_walk(collectives_walk.ring(3), terminal)
    assert "\x1b[" in terminal.getvalue()


def test_a_pipe_that_speaks_ascii_only_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_timelines([pipeline("1f1b", PipelineCase(2, 2))], stream)
    print_walk(collectives_walk.ring(2), stream)
    stream.flush()
    assert b"rank 0" in raw.getvalue()


def test_later_pieces_have_small_letters_and_the_legend_says_so() -> None:
    lines = text([pipeline("zbv", PipelineCase(2, 4))])
    assert "f0" in lines[2] or "f" in lines[2]
    assert any("small letters" in one for one in lines)
    assert not any("small letters" in one for one in text([pipeline("1f1b", PipelineCase(2, 4))]))
    both = text([pipeline("dualpipe", PipelineCase(2, 4))])
    assert any(one == "small letters: the second copy of the model" for one in both)
    assert not any("second copy" in one for one in lines)


def test_two_timelines_share_one_scale() -> None:
    long = Timeline(
        "long", 1, (TimelineSpan(0, 0.0, 20.0, "forward", "0"),), (MemorySample(0, 0.0, 2.0**20),)
    )
    short = Timeline(
        "short", 1, (TimelineSpan(0, 0.0, 10.0, "forward", "0"),), (MemorySample(0, 0.0, 2.0**19),)
    )
    lines = text([long, short])
    boxes = [len(one[10:]) for one in lines if one.startswith("rank 0    F0")]
    assert boxes[0] == 2 * boxes[1]
    bars = [one.count("#") for one in lines if "#" in one]
    assert bars[0] == 2 * bars[1]


def test_what_costs_nothing_is_not_drawn() -> None:
    line = Timeline(
        "t", 1, (TimelineSpan(0, 0.0, 0.0, "send"), TimelineSpan(0, 0.0, 1.0, "forward"))
    )
    assert [s.kind for row in make_rows(line) for s in row.spans] == ["forward"]
    assert not any("send" in one for one in text([line]))


def test_many_ranks_that_do_the_same_share_a_row() -> None:
    line = puzzle_timeline(7, "reference")
    assert rank_groups(line) == [tuple(range(first, 16, 4)) for first in range(4)]
    assert group_name(rank_groups(line)[1]) == "ranks 1 5 9 13"
    few = Timeline("t", 3, tuple(TimelineSpan(r, 0.0, 1.0 + r % 2, "forward") for r in range(3)))
    assert rank_groups(few) == [(0,), (1,), (2,)], "few ranks keep their order"


def test_more_rows_than_a_screen_are_counted_out() -> None:
    spans = tuple(TimelineSpan(r, float(r), r + 1.0, "forward", "0") for r in range(50))
    lines = text([Timeline("t", 50, spans)])
    assert any(one.startswith("… 18 more rows") for one in lines)


@pytest.mark.parametrize("end", [1e-7, 0.3, 1.0, 33.0, 99.999, 1e6])
@pytest.mark.parametrize("most", [2, 5, 12])
def test_ticks_are_few_round_and_inside(end: float, most: int) -> None:
    found = make_ticks(end, most)
    assert 1 <= len(found) <= most
    assert found[0] == 0
    assert found[-1] <= end * (1 + 1e-9)


@pytest.mark.parametrize(
    "walk",
    [
        collectives_walk.ring(4),
        collectives_walk.ring(16),
        collectives_walk.halving(16),
        zero_walk.zero(16),
        fsdp(16),
    ],
    ids=lambda walk: walk.title,
)
def test_step_throughs_fit_in_100_columns(walk) -> None:
    lines = [line.plain for line in walk_lines(walk)]
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("checked: ") for line in lines)


def test_a_table_says_what_came_from_whom() -> None:
    lines = [line.plain for line in walk_lines(collectives_walk.ring(2))]
    first = lines.index("1 of 2, reduce-scatter")
    assert lines[first + 1] == "0 → 1: c1 · 1 → 0: c0"
    assert re.search(r"\[\d+\]<1", lines[first + 3]), "rank 0 has the sum of c0 from rank 1"
    assert re.search(r"\[\d+\]<0", lines[first + 4])


def test_of_many_rounds_some_are_left_out_and_counted() -> None:
    lines = [line.plain for line in walk_lines(collectives_walk.ring(16))]
    assert sum("… 12 more rounds" in line for line in lines) == 2
    assert not any("more rounds" in line.plain for line in walk_lines(collectives_walk.ring(8)))


def test_nothing_to_draw_is_no_crash() -> None:
    print_timelines([Timeline("empty", 1, ())], io.StringIO())
