"""Shared parts of timeline drawings: names, letters and colours of span kinds, rows, ticks.

Ranks that do the same thing at the same time stand in one row. Times are shown in the unit that
keeps their figures short. Colours are those of Okabe and Ito (2008, "Color Universal Design"),
which people with any colour vision can distinguish; each colour also has a letter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.plans.timeline import MemorySample, Timeline, TimelineSpan
from shoal.base.text.units import bytes_text


@dataclass(frozen=True)
class SpanKind:
    """Name and appearance of one kind of span: one letter and a fill."""

    word: str
    letter: str
    fill: str


KINDS = {
    "forward": SpanKind("forward", "F", "#7cc4f0"),
    "backward": SpanKind("backward", "B", "#f0b040"),
    "input": SpanKind("input's gradient", "I", "#f08a6c"),
    "weight": SpanKind("weights' gradients", "W", "#4cc3a0"),
    "update": SpanKind("update", "U", "#d99ac0"),
    "compute": SpanKind("compute", "C", "#7cc4f0"),
    "all-reduce": SpanKind("all-reduce", "A", "#e8894a"),
    "reduce-scatter": SpanKind("reduce-scatter", "R", "#e8894a"),
    "all-gather": SpanKind("all-gather", "G", "#f2e35c"),
    "broadcast": SpanKind("broadcast", "D", "#f2e35c"),
    "send": SpanKind("send", "S", "#b9c0c9"),
    "receive": SpanKind("receive", "V", "#dfe3e8"),
    "wait": SpanKind("wait", "-", "#eceff3"),
    "copy": SpanKind("copy", "Y", "#b9c0c9"),
    "checkpoint": SpanKind("checkpoint", "K", "#8f9bd8"),
    "failure": SpanKind("failure", "X", "#e0504f"),
}
"""By the kind of a span, in the order in which a legend names them."""

MICROSECONDS = "\u00b5s"
FEW_RANKS = 8
INK, CURVE_FILL, PALEST = "#14171a", "#8f9bd8", 0.62
LANES = ("compute", "link")


@dataclass(frozen=True)
class TimelineRow:
    """One row of a drawing: the ranks it stands for, one lane of them, and its spans.

    Attributes:
        group: name of the ranks; `name` is that of the lane in their second row.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    lane: str
    spans: tuple[TimelineSpan, ...]


def span_kind(span: TimelineSpan) -> SpanKind:
    """Return the appearance of a span; an unknown kind looks like compute and keeps its own name.

    >>> (
    ...     span_kind(TimelineSpan(0, 0.0, 1.0, "forward")).letter,
    ...     span_kind(TimelineSpan(0, 0.0, 1.0, "nap")).word,
    ... )
    ('F', 'nap')
    """
    found = KINDS.get(span.kind)
    return found or SpanKind(span.kind, span.kind[:1].upper() or "?", "#b9c0c9")


def rank_groups(timeline: Timeline) -> list[tuple[int, ...]]:
    """Group ranks that do and hold the same; up to 8 ranks, only neighbours share a group.

    With more ranks, the partners of their messages are ignored.

    >>> alike = tuple(TimelineSpan(rank, 0.0, 1.0, "forward") for rank in range(3))
    >>> rank_groups(Timeline("t", 4, (*alike, TimelineSpan(3, 0.0, 2.0, "forward"))))
    [(0, 1, 2), (3,)]
    """
    many = timeline.ranks > FEW_RANKS
    does: dict[int, list[tuple[object, ...]]] = {rank: [] for rank in range(timeline.ranks)}
    for span in drawn_spans(timeline):
        label = "" if many and span.kind in ("send", "receive") else span.label
        does[span.rank].append((span.start_s, span.end_s, span.kind, label, span.lane))
    for held in timeline.memory:
        does[held.rank].append((held.time_s, held.held_bytes, "", "", "held"))
    groups: dict[tuple[object, ...], list[int]] = {}
    turn = 0
    for rank, all_of_it in does.items():
        same = tuple(sorted(all_of_it, key=repr))
        if not many and rank and (turn, same) not in groups:
            turn += 1
        groups.setdefault((turn, same), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def group_name(ranks: Sequence[int], member: str = "rank") -> str:
    """Return the name of a group of ranks.

    Args:
        member: of the timeline: rank, or island.

    >>> group_name([2]), group_name([0, 1, 2]), group_name([0, 4, 8]), group_name(range(0, 64, 2))
    ('rank 2', 'ranks 0–2', 'ranks 0 4 8', 'ranks 0 2 4 … 62')
    >>> group_name([0, 1], "island")
    'islands 0–1'
    """
    if len(ranks) == 1:
        return f"{member} {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{member}s {ranks[0]}–{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return f"{member}s {' '.join(shown if len(shown) < 5 else [*shown[:3], '…', shown[-1]])}"


def drawn_spans(timeline: Timeline) -> list[TimelineSpan]:
    """Return the spans that take time; messages that cost nothing are not drawn."""
    return [span for span in timeline.spans if span.end_s > span.start_s]


def make_rows(timeline: Timeline) -> list[TimelineRow]:
    """Return all rows, from rank 0 down; an unused lane has none."""
    drawn = drawn_spans(timeline)
    present = {span.lane for span in drawn}
    by_place: dict[tuple[int, str], list[TimelineSpan]] = {}
    for span in sorted(drawn, key=lambda span: span.start_s):
        by_place.setdefault((span.rank, span.lane), []).append(span)
    used = [lane for lane in LANES if lane in present] + sorted(present - set(LANES))
    result = []
    for ranks in rank_groups(timeline):
        group = group_name(ranks, timeline.member)
        for place, lane in enumerate(used):
            spans = tuple(by_place.get((ranks[0], lane), ()))
            result.append(TimelineRow(lane if place else group, group, ranks, lane, spans))
    return result


def legend_kinds(timelines: Sequence[Timeline]) -> list[SpanKind]:
    """Return the kinds that occur, in a fixed order; kinds outside the table come last."""
    present = {span.kind: span for timeline in timelines for span in drawn_spans(timeline)}
    known = [KINDS[kind] for kind in KINDS if kind in present]
    return known + [span_kind(span) for kind, span in present.items() if kind not in KINDS]


def held_by_rank(timeline: Timeline) -> dict[int, list[MemorySample]]:
    """Return each rank's held memory over time; the last of several entries at one instant counts.

    >>> both = (MemorySample(0, 1.0, 5.0), MemorySample(0, 0.0, 3.0), MemorySample(0, 1.0, 4.0))
    >>> [held.held_bytes for held in held_by_rank(Timeline("t", 1, (), both))[0]]
    [3.0, 4.0]
    """
    found: dict[int, dict[float, MemorySample]] = {rank: {} for rank in range(timeline.ranks)}
    for held in sorted(timeline.memory, key=lambda held: held.time_s):
        found[held.rank][held.time_s] = held
    return {rank: list(by_time.values()) for rank, by_time in found.items()}


def peak_by_rank(timeline: Timeline) -> dict[int, float]:
    """Return the most bytes that each rank of a timeline holds at once."""
    found = dict.fromkeys(range(timeline.ranks), 0.0)
    for held in timeline.memory:
        found[held.rank] = max(found[held.rank], held.held_bytes)
    return found


def time_unit(end_s: float, unit: str) -> tuple[str, float]:
    """Return (name of an axis's unit, units per second or step).

    >>> time_unit(0.002, "s"), time_unit(33.0, "s"), time_unit(33.0, "steps")
    (('ms', 1000.0), ('s', 1.0), ('steps', 1.0))
    """
    if unit != "s" or end_s >= 1 or end_s <= 0:
        return unit, 1.0
    return ("ms", 1e3) if end_s >= 1e-3 else (MICROSECONDS, 1e6)


def make_ticks(end: float, most: int) -> list[float]:
    """Return round figures from 0 to `end`, at most `most` of them, 1, 2 or 5 · 10^k apart.

    >>> make_ticks(33.0, 8), make_ticks(0.9, 4)
    ([0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0], [0.0, 0.5])
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / max(1, most)))
    for factor in (1, 2, 5, 10, 20):
        step = factor * power
        if int(end / step + 1e-9) + 1 <= most:
            break
    return [round(place * step, 12) for place in range(int(end / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """Format a tick's figure without trailing zeros.

    >>> tick_text(5.0), tick_text(0.25)
    ('5', '0.25')
    """
    return f"{value:g}"


def micro_batch_and_stage(span: TimelineSpan) -> tuple[str, int | None]:
    """Return the micro-batch and stage in a pipeline action's label.

    A capital letter before the number repeats the kind and is dropped.

    >>> micro_batch_and_stage(TimelineSpan(0, 0.0, 1.0, "forward", "F12@5"))
    ('12', 5)
    >>> micro_batch_and_stage(TimelineSpan(0, 0.0, 1.0, "all-gather", "u3"))
    ('u3', None)
    """
    found = re.fullmatch(r"[A-Z](\d+)(?:@(\d+))?", span.label)
    if not found:
        return span.label, None
    return found[1], int(found[2]) if found[2] else None


def row_stages(row: TimelineRow) -> list[int]:
    """Return the model stages that a rank works on, in order; [] if its labels name none."""
    found = {micro_batch_and_stage(span)[1] for span in row.spans}
    return sorted(stage for stage in found if stage is not None)


def stage_index(span: TimelineSpan, stages: Sequence[int]) -> int:
    """Return the index of a span's stage among the rank's own stages; 0 for the first."""
    stage = micro_batch_and_stage(span)[1]
    return stages.index(stage) if stage in stages else 0


def box_colour(span: TimelineSpan, stages: Sequence[int]) -> str:
    """Return the colour of a box: paler for a rank's later model stages."""
    paler = stage_index(span, stages) / max(1, len(stages) - 1) * PALEST
    return mix_with_white(span_kind(span).fill, paler)


def mix_with_white(fill: str, paler: float) -> str:
    """Mix a colour with white.

    >>> mix_with_white("#000080", 0.5)
    '#8080c0'
    """
    parts = [int(fill[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * paler):02x}" for part in parts)


def has_several_stages(timelines: Sequence[Timeline]) -> bool:
    """Return whether any rank works on more than one model stage."""
    return any(len(row_stages(row)) > 1 for timeline in timelines for row in make_rows(timeline))


def later_stages_text(timelines: Sequence[Timeline]) -> str:
    """Return the legend's name of a rank's later stages.

    Later stages that see other micro-batches are a second copy of the model.

    >>> first = TimelineSpan(0, 0.0, 1.0, "forward", "F0@0")
    >>> other, same = (TimelineSpan(0, 1.0, 2.0, "forward", label) for label in ("F1@3", "F0@3"))
    >>> later_stages_text([Timeline("t", 1, (first, other))])
    'the second copy of the model'
    >>> later_stages_text([Timeline("t", 1, (first, same))])
    "a rank's later piece of the model"
    """
    for row in (row for timeline in timelines for row in make_rows(timeline)):
        seen: dict[int, set[str]] = {}
        for span in row.spans:
            number, stage = micro_batch_and_stage(span)
            if stage is not None:
                seen.setdefault(stage, set()).add(number)
        pieces = list(seen.values())
        if len(pieces) > 1 and not set.intersection(*pieces):
            return "the second copy of the model"
    return "a rank's later piece of the model"


def amount_text(timeline: Timeline, held: float) -> str:
    """Format a held amount with its unit.

    >>> (
    ...     amount_text(Timeline("t", 1, ()), 2**20),
    ...     amount_text(Timeline("t", 1, (), held_unit="x"), 5.5),
    ... )
    ('1.0 MiB', '5.5 x')
    >>> both = Timeline("t", 1, (), held_unit="micro-batches")
    >>> amount_text(both, 2.9999), amount_text(both, 1.0)
    ('3 micro-batches', '1 micro-batch')
    """
    if timeline.held_unit == "bytes":
        return bytes_text(held)
    figure, unit = f"{held:,.2f}".rstrip("0").rstrip("."), timeline.held_unit
    if figure == "1":
        unit = unit.removesuffix("es" if unit.endswith("ches") else "s")
    return f"{figure} {unit}"


def box_label(span: TimelineSpan, room: int, piece: int = 0, *, coloured: bool = False) -> str:
    """Return the text of a box with room for so many characters: at best letter and number.

    Args:
        piece: a rank's later model stages have small letters.
        coloured: the colour shows the kind, so that the number matters more than the letter.

    >>> box = TimelineSpan(0, 0.0, 1.0, "forward", "12")
    >>> box_label(box, 5), box_label(box, 2), box_label(box, 1), box_label(box, 3, piece=1)
    ('F12', 'F', 'F', 'f12')
    """
    letter = span_kind(span).letter
    letter = letter.lower() if piece else letter
    number = micro_batch_and_stage(span)[0]
    texts = [f"{letter}{number}", number if coloured and number else letter, letter]
    return next((text for text in texts if len(text) <= room), "")
