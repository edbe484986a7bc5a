"""Table of the ranks of a run: a row each, or the worst of them under a line about all.

A row has the mean of the rank's newest steps as a bar: its length is the step's time beside the
slowest rank's, its letters are the parts. "late" is how long the others wait for this rank in a
usual step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.base.runlog.rank_records import PARTS
from shoal.base.text.units import bytes_text, seconds_text
from shoal.view.watch.styled_lines import (
    Line,
    Span,
    cell_width,
    clean_text,
    cut_line,
    cut_text,
    pad_text,
)
from shoal.view.watch.watch_state import RankState

LETTERS = {
    "data": ("d", "data"),
    "passes": ("f", "forward and backward"),
    "sum": ("s", "sum"),
    "update": ("u", "update"),
    "hooks": ("c", "callbacks"),
    "other": ("o", "other"),
    "waiting": (".", "waiting"),
}
"""Part of a step → its letter in a bar, and its word in the legend."""
LATE_SHARE = 0.1
"""A rank is late if the others wait for it for this share of its step."""
NOTE_STYLES = {"dead": "bold red", "hung": "bold red"}
HOST_WIDTH = 16
MEAN_WIDTH = 34
"""Columns of a bar from which its heading says what it is."""
WIDE = 110
"""Columns from which host and device are shown."""


def step_parts_s(rank: RankState) -> dict[str, float]:
    """Return the mean seconds of a rank's newest steps by part; forward and backward are one."""
    seconds = dict(zip(PARTS, rank.seconds, strict=True))
    seconds["passes"] += seconds.pop("backward")
    return {part: seconds[part] for part in LETTERS}


def sort_worst_first(ranks: Sequence[RankState]) -> list[RankState]:
    """Return dead and hung ranks, then those that lag, then those the others wait for longest."""
    newest = max((rank.step for rank in ranks), default=0)
    return sorted(
        ranks, key=lambda one: (not one.note, one.step >= newest - 1, -one.late_s, len(one.name))
    )


def draw_ranks(
    ranks: Sequence[RankState], width: int, height: int, *, first: int = 0
) -> list[Line]:
    """Return a heading and the rows of the ranks, in at most `height` lines.

    Ranks that do not fit are summed up in one line, and the worst come first.

    Args:
        first: rows that were scrolled away.
    """
    if not ranks or height < 2:
        return []
    lines: list[Line] = []
    room = height - 1
    shown = list(ranks)
    if len(ranks) > room:
        lines.append(cut_line([(summarise_ranks(ranks), "")], width))
        room -= 1
        shown = sort_worst_first(ranks)[min(first, max(0, len(ranks) - room)) :][: max(0, room)]
    columns = _columns(ranks, width)
    widths = [
        max([cell_width(one.head), *(cell_width(one.text(rank)) for rank in shown)])
        for one in columns
    ]
    bar_width = width - sum(widths) - 2 * len(widths)
    longest_s = max((rank.step_s for rank in ranks), default=0.0)
    heads = [
        pad_text(one.head, columns_of, right=one.right)
        for one, columns_of in zip(columns, widths, strict=True)
    ]
    heads.append("by part, mean of recent steps" if bar_width > MEAN_WIDTH else "by part")
    lines.append(cut_line([("  ".join(heads), "dim")], width))
    for rank in shown:
        spans: list[Span] = []
        for one, columns_of in zip(columns, widths, strict=True):
            text = pad_text(one.text(rank), columns_of, right=one.right)
            spans.append((f"{text}  ", one.style(rank)))
        lines.append(cut_line([*spans, *_bar(rank, bar_width, longest_s)], width))
    return lines


def fit_legend(width: int) -> str:
    """Return what the letters of a bar mean, in words as long as there is room for.

    >>> fit_legend(60)
    'd data f fwd+bwd s sum u update c callbacks o other . wait'
    """
    long = "  ".join(f"{letter} {word}" for letter, word in LETTERS.values())
    short = "d data f fwd+bwd s sum u update c callbacks o other . wait"
    return next((text for text in (long, short) if len(text) <= width), short)


@dataclass(frozen=True)
class RankColumn:
    """A column of the table: heading, and text and style by rank."""

    head: str
    text: Callable[[RankState], str]
    style: Callable[[RankState], str] = lambda _: ""
    right: bool = True


def _columns(ranks: Sequence[RankState], width: int) -> list[RankColumn]:
    newest = max(rank.step for rank in ranks)

    def note_style(rank: RankState) -> str:
        return NOTE_STYLES.get(rank.note, "")

    def step_style(rank: RankState) -> str:
        return "yellow" if rank.step < newest - 1 else ""

    def late_style(rank: RankState) -> str:
        return "bold yellow" if rank.late_s > LATE_SHARE * (rank.step_s or 1) else ""

    wide, many_hosts = width >= WIDE, len({rank.host for rank in ranks}) > 1
    columns = [
        RankColumn("rank", lambda one: one.name, note_style),
        RankColumn("", lambda one: one.note, note_style, right=False),
        RankColumn("role", lambda one: one.role, right=False),
        RankColumn("host", lambda one: cut_text(one.host, HOST_WIDTH), right=False),
        RankColumn("device", lambda one: cut_text(one.device, HOST_WIDTH), right=False),
        RankColumn("now", lambda one: one.sample, right=False),
        RankColumn("step", lambda one: str(one.step) if one.step else "–", step_style),
        RankColumn("time", lambda one: seconds_text(one.step_s) if one.step else "–"),
        RankColumn("late", lambda one: seconds_text(one.late_s) if one.step else "–", late_style),
        RankColumn("memory", lambda one: bytes_text(one.memory_bytes) if one.memory_bytes else "–"),
    ]
    is_shown = {
        "": any(rank.note for rank in ranks),
        "role": any(rank.role for rank in ranks),
        "host": many_hosts or wide,
        "device": wide and any(rank.device for rank in ranks),
        "now": wide and any(rank.sample for rank in ranks),
    }
    return [one for one in columns if is_shown.get(one.head, True)]


def _bar(rank: RankState, width: int, longest_s: float) -> list[Span]:
    """Return a step's parts as letters, in proportion to their time."""
    if width < 4 or longest_s <= 0:
        return []
    spans: list[Span] = []
    done_s, drawn = 0.0, 0
    for part, seconds in step_parts_s(rank).items():
        done_s += seconds
        until = min(width, round(done_s / longest_s * width))
        if until > drawn:
            spans.append((LETTERS[part][0] * (until - drawn), part))
            drawn = until
    return spans


def summarise_ranks(ranks: Sequence[RankState]) -> str:
    """Return one line on all ranks: percentiles of step time, lateness and memory."""
    steps = [rank.step for rank in ranks]
    span = f"{min(steps)}–{max(steps)}" if min(steps) < max(steps) else str(max(steps))
    noted = [f"{one.name} {one.note}" for one in ranks if one.note][:4]
    times_s = sorted(rank.step_s for rank in ranks)
    late_s = sorted(rank.late_s for rank in ranks)
    words = [
        f"{len(ranks)} ranks at step {span}",
        *noted,
        f"time {seconds_text(statistics.median(times_s))} median, {seconds_text(times_s[-1])} most",
        f"late {seconds_text(statistics.median(late_s))} median, "
        f"{seconds_text(late_s[len(late_s) * 9 // 10])} p90, {seconds_text(late_s[-1])} most",
        f"memory {bytes_text(max(rank.memory_bytes for rank in ranks))} most",
    ]
    return clean_text(" · ".join(words))
