"""Draw a timeline with letters: one row per rank, time to the right, at most 100 columns.

A box starts with the letter of its kind and the number of its micro-batch (`F3--`); `.` is idle. On
a terminal the kinds have colours; elsewhere only plain characters are written. If boxes are
narrower than a column, a column shows the letter of the box at its middle, and only a box with room
for its whole label has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TextIO

from rich.console import Console
from rich.text import Text

from shoal.base.plans.timeline import Timeline, TimelineSpan
from shoal.base.text.terminal_encoding import READABLE
from shoal.teach.drawings.packed_words import facts_lines, pack_words
from shoal.teach.drawings.timeline_rows import (
    CURVE_FILL,
    INK,
    TimelineRow,
    amount_text,
    box_colour,
    box_label,
    group_name,
    has_several_stages,
    later_stages_text,
    legend_kinds,
    make_rows,
    make_ticks,
    micro_batch_and_stage,
    peak_by_rank,
    rank_groups,
    row_stages,
    stage_index,
    tick_text,
    time_unit,
)

WIDTH = 100
MOST_ROWS, WIDEST_BOX, BAR = 32, 6, 30


def print_timelines(timelines: Sequence[Timeline], stream: TextIO) -> None:
    """Write timelines on one common scale, in colours only on a terminal."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    coloured = console.is_terminal and console.color_system is not None
    width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    for line in timeline_lines(timelines, width, coloured=coloured):
        print_line(console, line, stream)


def print_line(console: Console, line: Text, stream: TextIO) -> None:
    """Write one line; `?` replaces characters that the stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"
    if line.plain.encode(encoding, READABLE).decode(encoding) != line.plain:
        line = Text(line.plain.encode(encoding, READABLE).decode(encoding))
    console.print(line, soft_wrap=True)


def timeline_lines(
    timelines: Sequence[Timeline], width: int = WIDTH, *, coloured: bool = False
) -> list[Text]:
    """Draw timelines as lines of at most `width` columns: title, axis, rows, peaks, facts, legend.

    Args:
        coloured: boxes have colours, so that their tails need no dashes.
    """
    names = [row.name for timeline in timelines for row in make_rows(timeline)]
    margin = 12 if any(timeline.unit != "s" for timeline in timelines) else 10
    margin = max([margin, *(len(name) + 2 for name in names)])
    end_s = max((timeline.end_s for timeline in timelines), default=0.0)
    per_s = columns_per_second(timelines, width - margin - 1)
    fine = per_s * _shortest_s(timelines) >= 1 - 1e-6
    most = max((held.held_bytes for timeline in timelines for held in timeline.memory), default=0)
    lines: list[Text] = []
    for timeline in timelines:
        lines.append(Text(timeline.title, style="bold"))
        lines.append(_axis(end_s, timeline.unit, per_s, margin, width))
        shown = make_rows(timeline)
        for row in shown[:MOST_ROWS]:
            lines.append(_row(row, timeline.end_s, per_s, margin, coloured, fine))
        if len(shown) > MOST_ROWS:
            lines.append(Text(f"… {len(shown) - MOST_ROWS} more rows: draw them with --svg FILE"))
        lines += _peaks(timeline, most, coloured=coloured)
        lines += [Text(line) for line in facts_lines(timeline.facts, width)]
        lines.append(Text(""))
    return [*lines, *_legend(timelines, width, coloured=coloured)]


def columns_per_second(timelines: Sequence[Timeline], columns: int) -> float:
    """Return the scale of the drawn timelines: terminal columns per second.

    If they fit, the shortest common duration of the spans gets a whole number of columns.

    Args:
        timelines: drawn on one scale.
        columns: width of the longest one.

    >>> columns_per_second(
    ...     [
    ...         Timeline(
    ...             "t",
    ...             1,
    ...             (TimelineSpan(0, 0.0, 1.0, "forward"), TimelineSpan(0, 1.0, 3.0, "backward")),
    ...         )
    ...     ],
    ...     9,
    ... )
    3.0
    """
    spans = [span for timeline in timelines for span in timeline.spans]
    end_s = max((span.end_s for span in spans), default=0.0)
    if end_s <= 0:
        return 1.0
    piece_s = _common_duration_s(spans)
    if piece_s and round(end_s / piece_s) <= columns:
        return min(columns // round(end_s / piece_s), WIDEST_BOX) / piece_s
    return columns / end_s


def _shortest_s(timelines: Sequence[Timeline]) -> float:
    lengths = (s.end_s - s.start_s for timeline in timelines for s in timeline.spans)
    return min((length_s for length_s in lengths if length_s > 0), default=0.0)


def _common_duration_s(spans: Sequence[TimelineSpan]) -> float:
    """Return the longest duration that divides every start and end; 0.0 if there is no good one."""
    shortest_s = min((s.end_s - s.start_s for s in spans if s.end_s > s.start_s), default=0.0)
    moments = {moment for span in spans for moment in (span.start_s, span.end_s)}
    for parts in range(1, 11):
        piece_s = shortest_s / parts
        if piece_s and all(abs(m / piece_s - round(m / piece_s)) < 1e-6 for m in moments):
            return piece_s
    return 0.0


def _axis(end_s: float, unit: str, per_s: float, margin: int, width: int) -> Text:
    """Return an axis with figures over their columns, and the unit once, at the left."""
    name, times = time_unit(end_s, unit)
    text = f"time, {name}".ljust(margin)
    for value in make_ticks(end_s * times, max(2, round(end_s * per_s / 9))):
        place = margin + round(value / times * per_s)
        if len(text) <= place and place + len(tick_text(value)) <= width:
            text = text.ljust(place) + tick_text(value)
    return Text(text, style="dim")


def _row(
    row: TimelineRow, end_s: float, per_s: float, margin: int, coloured: bool, fine: bool
) -> Text:
    """Draw one row of boxes.

    Args:
        fine: every box is at least a column wide, so that labels fit.
    """
    line = Text(row.name.ljust(margin))
    columns = math.ceil(end_s * per_s - 1e-6)
    owner: list[TimelineSpan | None] = [None] * columns
    for span in row.spans:
        first, last = _columns(span, per_s)
        for column in range(first, min(last, columns)):
            owner[column] = span
    edges = [0, *(c for c in range(1, columns) if owner[c] is not owner[c - 1]), columns]
    stages = row_stages(row)
    for first, last in pairwise(edges):
        does, room = owner[first] if first < columns else None, last - first
        if does is None:
            line.append(("." if not coloured else "·") * room, style="dim")
            continue
        piece = stage_index(does, stages)
        wide = fine or room > len(micro_batch_and_stage(does)[0])
        text = box_label(does, room if wide else 1, piece, coloured=coloured and wide)
        tail = " " if coloured else ("-" if wide else text)
        line.append(
            text.ljust(room, tail), style=f"{INK} on {box_colour(does, stages)}" if coloured else ""
        )
    return line


def _columns(span: TimelineSpan, per_s: float) -> tuple[int, int]:
    """Return the first column and the end column of those whose middle the span covers."""
    return round(span.start_s * per_s + 1e-6), round(span.end_s * per_s + 1e-6)


def _peaks(timeline: Timeline, most: float, *, coloured: bool) -> list[Text]:
    """Return one bar per row of ranks: its peak, relative to the largest peak of any rank."""
    if not timeline.memory:
        return []
    groups, most_of = rank_groups(timeline), peak_by_rank(timeline)
    names = [group_name(ranks, timeline.member) for ranks in groups]
    margin = max(map(len, names)) + 2
    lines = [Text("most held at once", style="bold")]
    for name, ranks in list(zip(names, groups, strict=True))[:MOST_ROWS]:
        peak = most_of[ranks[0]]
        bar = ("█" if coloured else "#") * (round(BAR * peak / most) if most else 0)
        line = Text(name.ljust(margin))
        line.append(bar.ljust(BAR), style=CURVE_FILL if coloured else "")
        lines.append(line.append(f"  {amount_text(timeline, peak)}"))
    return lines


def _legend(timelines: Sequence[Timeline], width: int, *, coloured: bool) -> list[Text]:
    small = f"{'paler' if coloured else 'small letters'}: {later_stages_text(timelines)}"
    more = [small] if has_several_stages(timelines) else []
    if not coloured:
        words = [f"{kind.letter} {kind.word}" for kind in legend_kinds(timelines)]
        return [Text(line) for line in pack_words([*words, ". idle", *more], "   ", width)]
    lines = [Text()]
    for kind in legend_kinds(timelines):
        if len(lines[-1]) + len(kind.word) + 6 > width:
            lines.append(Text())
        lines[-1].append(f" {kind.letter} ", style=f"{INK} on {kind.fill}")
        lines[-1].append(f" {kind.word}  ")
    return lines + [Text(line, style="dim") for line in more]
