"""Draw timelines as one self-contained SVG picture: boxes, axis, memory curves, legend.

Rows are ranks, time runs to the right on one scale for all timelines of the picture, the number in
a box is its micro-batch. Under the boxes each rank has a curve of its held memory. In dark mode the
picture shows light letters on a dark ground, by `prefers-color-scheme`.

Widths of letters are estimates (0.6 of the font's size), so a text is drawn in a box only if it
fits with room to spare. Source: SVG 1.1, W3C 2011; Media Queries Level 5, W3C.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.base.plans.timeline import Timeline, TimelineSpan
from shoal.teach.drawings.packed_words import count_letters, facts_lines
from shoal.teach.drawings.timeline_rows import (
    TimelineRow,
    amount_text,
    box_colour,
    drawn_spans,
    group_name,
    has_several_stages,
    held_by_rank,
    later_stages_text,
    legend_kinds,
    make_rows,
    make_ticks,
    micro_batch_and_stage,
    peak_by_rank,
    rank_groups,
    row_stages,
    span_kind,
    tick_text,
    time_unit,
)

NARROW, WIDEST = 960, 1400
"""Pixels: the usual width, and the most for a picture with many small boxes."""

SMALL, TEXT, TITLE = 11, 13, 16
"""Font sizes: in boxes, on axes and in lines, of titles."""

ROW, GAP, CURVE, SIDE = 26, 4, 34, 20
LETTER, PROSE = 0.6, 0.54
"""Width of a letter relative to the font size: at most, and in running text."""

MANY = 4
"""Number of rows from which curves are lower."""

COMFORTABLE = 14
"""Pixels of a box that fits a one-digit number."""

STYLE = """
svg{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
.ground{fill:#ffffff}.ink{fill:#1b1f24}.faint{fill:#57606a}.lane{fill:#f3f5f7}
.grid{stroke:#d0d7de;stroke-width:1}.box{stroke:#1b1f24;stroke-opacity:.55;stroke-width:.8}
.inside{fill:#14171a}.curve{fill:#8f9bd8;fill-opacity:.75}
.fresh{stroke:#14171a;stroke-width:2.5}
@media (prefers-color-scheme: dark){
.ground{fill:#0d1117}.ink{fill:#e6edf3}.faint{fill:#9aa4af}.lane{fill:#171c23}
.grid{stroke:#30363d}.box{stroke:#0d1117}.box[fill="none"]{stroke:#9aa4af}.curve{fill:#7f8be0}
.fresh{stroke:#ffffff}
}
"""


def text_width(text: str, size: float) -> float:
    """Return the estimated maximum width of a text in pixels.

    >>> text_width("rank 0", 10)
    36.0
    """
    return count_letters(text) * size * LETTER


def svg_document(parts: Sequence[str], width: float, height: float, name: str) -> str:
    """Return a whole SVG file around drawn parts; `name` is the text for screen readers.

    >>> svg_document([], 10, 10, "a < b").startswith(
    ...     '<svg xmlns="http://www.w3.org/2000/svg" width="10'
    ... )
    True
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(name)}">'
    )
    ground = f'<rect class="ground" width="{width:g}" height="{height:g}" rx="6"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *parts, "</svg>\n"])


def svg_text(
    x: float, y: float, text: str, size: float = TEXT, look: str = "ink", extra: str = ""
) -> str:
    """Return one line of text with its baseline at y."""
    more = f" {extra}" if extra else ""
    return (
        f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{more}>'
        f"{escape(text)}</text>"
    )


def timeline_svg(timelines: Sequence[Timeline]) -> str:
    """Return the SVG text of timelines, one below the other on one scale."""
    width = _width(timelines)
    parts, y = timeline_parts(timelines, SIDE, width)
    title = "; ".join(timeline.title for timeline in timelines)
    return svg_document(parts, width, y + SIDE - 6, title)


def timeline_parts(
    timelines: Sequence[Timeline], y: float, width: float
) -> tuple[list[str], float]:
    """Draw timelines from y down, with their legend; return the parts and their lower end."""
    left, right = _margins(timelines)
    end_s = max((timeline.end_s for timeline in timelines), default=0.0) or 1.0
    per_s = (width - left - right) / end_s
    most = max((held.held_bytes for timeline in timelines for held in timeline.memory), default=0)
    parts: list[str] = []
    for timeline in timelines:
        drawn, y = _timeline(timeline, y, left, per_s, end_s, width, most or 1.0)
        parts += drawn
    drawn, y = _legend(timelines, y, width)
    return parts + drawn, y


def _margins(timelines: Sequence[Timeline]) -> tuple[float, float]:
    """Return (left, right) margins, for the names of rows and the figures beside the curves."""
    names = [row.name for timeline in timelines for row in make_rows(timeline)]
    units = [time_unit(timeline.end_s, timeline.unit)[0] for timeline in timelines]
    heads = [text_width(f"time, {unit}", 12) for unit in units]
    left = max(0.0, *heads, *(text_width(name, TEXT) for name in names)) + SIDE + 12
    sizes = [
        amount_text(timeline, peak)
        for timeline in timelines
        for peak in set(peak_by_rank(timeline).values() if timeline.memory else ())
    ]
    return left, SIDE + 8 + max((text_width(peak, TEXT) for peak in sizes), default=0)


def _width(timelines: Sequence[Timeline]) -> float:
    """Return a width for a digit in the smallest labelled box, within bounds."""
    spans = [s for timeline in timelines for s in drawn_spans(timeline) if s.label]
    if not spans:
        return NARROW
    end_s = max(timeline.end_s for timeline in timelines)
    shortest_s = min(span.end_s - span.start_s for span in spans)
    wanted = sum(_margins(timelines)) + end_s / shortest_s * COMFORTABLE
    return float(min(max(NARROW, round(wanted)), WIDEST))


def _timeline(
    timeline: Timeline,
    y: float,
    left: float,
    per_s: float,
    end_s: float,
    width: float,
    most: float,
) -> tuple[list[str], float]:
    """Draw one timeline from y down; return its parts and the start of the next."""
    parts = [svg_text(SIDE, y + TITLE, timeline.title, TITLE, extra='font-weight="600"')]
    y += TITLE + 16
    shown = make_rows(timeline)
    lanes_per_rank = max(1, len({row.lane for row in shown}))
    top = y
    body: list[str] = []
    for place, row in enumerate(shown):
        if lanes_per_rank > 1 and place and place % lanes_per_rank == 0:
            y += 2 * GAP
        body += _row(row, timeline, y, left, per_s, end_s)
        y += ROW + GAP
    if timeline.memory:
        drawn, y = _curves(timeline, y + 10, left, per_s, end_s, most)
        body += drawn
    axis, y = _axis(timeline, top, y, left, per_s, end_s)
    parts += axis + body
    for line in facts_lines(timeline.facts, int((width - 2 * SIDE) / (TEXT * PROSE))):
        parts.append(svg_text(SIDE, y + TEXT, line, TEXT, "faint"))
        y += TEXT + 6
    return parts, y + 16


def _axis(
    timeline: Timeline, top: float, bottom: float, left: float, per_s: float, end_s: float
) -> tuple[list[str], float]:
    """Draw vertical lines at round times through everything, their figures and the unit below."""
    unit, times = time_unit(end_s, timeline.unit)
    parts = []
    for value in make_ticks(end_s * times, 12):
        x = left + value / times * per_s
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4:.1f}" y2="{bottom:.1f}"/>'
        )
        parts.append(
            svg_text(x, bottom + TEXT + 2, tick_text(value), 12, "faint", 'text-anchor="middle"')
        )
    parts.append(svg_text(SIDE, bottom + TEXT + 2, f"time, {unit}", 12, "faint"))
    return parts, bottom + TEXT + 14


def _row(
    row: TimelineRow, timeline: Timeline, y: float, left: float, per_s: float, end_s: float
) -> list[str]:
    parts = [
        svg_text(SIDE, y + ROW / 2 + TEXT * 0.36, row.name),
        f'<rect class="lane" x="{left:.1f}" y="{y:.1f}" width="{end_s * per_s:.1f}" '
        f'height="{ROW}"/>',
    ]
    stages, axis = row_stages(row), time_unit(end_s, timeline.unit)
    for span in row.spans:
        parts += _box(span, row, axis, (left, y), per_s, box_colour(span, stages))
    return parts


def _box(
    span: TimelineSpan,
    row: TimelineRow,
    axis: tuple[str, float],
    corner: tuple[float, float],
    per_s: float,
    fill: str,
) -> list[str]:
    (left, y), (name, times) = corner, axis
    kind = span_kind(span)
    x, wide = left + span.start_s * per_s, (span.end_s - span.start_s) * per_s
    label, stage = micro_batch_and_stage(span)
    words = (kind.word, label, "" if stage is None else f"of stage {stage}")
    says = (
        f"{row.group}: {' '.join(filter(None, words))}, "
        f"from {span.start_s * times:.4g} to {span.end_s * times:.4g} {name}"
    )
    if span.note:
        says += f"; {span.note}"
    parts = [
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.8):.1f}" height="{ROW}" '
        f'fill="{fill}"><title>{escape(says)}</title></rect>'
    ]
    for size in (SMALL + 1, SMALL, SMALL - 1):
        if label and text_width(label, size) + 3 <= wide:
            middle = (x + wide / 2, y + ROW / 2 + size * 0.36)
            parts.append(svg_text(*middle, label, size, "inside", 'text-anchor="middle"'))
            break
    return parts


def _curves(
    timeline: Timeline, y: float, left: float, per_s: float, end_s: float, most: float
) -> tuple[list[str], float]:
    """Draw each rank's held memory over time, all on one scale, the peak beside its curve."""
    groups, history, most_of = rank_groups(timeline), held_by_rank(timeline), peak_by_rank(timeline)
    parts = [
        svg_text(left, y + TEXT - 2, "held by each rank", 12, "faint"),
        svg_text(left + end_s * per_s + 8, y + TEXT - 2, "at most", 12, "faint"),
    ]
    y += TEXT + 6
    high = CURVE if len(groups) <= MANY else ROW
    for ranks in groups:
        base = y + high
        points = [f"M{left:.1f},{base:.1f}"]
        level = base
        for held in history[ranks[0]]:
            x = left + min(held.time_s, end_s) * per_s
            points.append(f"L{x:.1f},{level:.1f}")
            level = base - held.held_bytes / most * (high - 3)
            points.append(f"L{x:.1f},{level:.1f}")
        x = left + timeline.end_s * per_s
        points += [f"L{x:.1f},{level:.1f}", f"L{x:.1f},{base:.1f}Z"]
        peak = amount_text(timeline, most_of[ranks[0]])
        parts += [
            f'<path class="curve" d="{"".join(points)}"/>',
            f'<line class="grid" x1="{left:.1f}" x2="{left + end_s * per_s:.1f}" '
            f'y1="{base:.1f}" y2="{base:.1f}"/>',
            svg_text(SIDE, y + high / 2 + TEXT * 0.36, group_name(ranks, timeline.member)),
            svg_text(left + end_s * per_s + 8, y + high / 2 + TEXT * 0.36, peak),
        ]
        y = base + GAP + 2
    return parts, y


def _legend(timelines: Sequence[Timeline], y: float, width: float) -> tuple[list[str], float]:
    kinds = [(kind.word, kind.fill) for kind in legend_kinds(timelines)]
    parts, _, y = legend_boxes(kinds, y + 4, width)
    if has_several_stages(timelines):
        y += 22
        says = f"paler boxes: {later_stages_text(timelines)}"
        parts.append(svg_text(SIDE, y + 12, says, TEXT, "faint"))
    return parts, y + 20


def legend_boxes(
    kinds: Sequence[tuple[str, str]], y: float, width: float
) -> tuple[list[str], float, float]:
    """Draw a box and a word for each kind, in as many lines as they need.

    Args:
        kinds: word and colour of each.
        y: of the first line.
        width: of the drawing.

    Returns:
        The parts, and x and y behind the last word.
    """
    parts: list[str] = []
    x = float(SIDE)
    for word, fill in kinds:
        wide = 20 + text_width(word, TEXT) + 14
        if x + wide > width - SIDE and x > SIDE:
            x, y = float(SIDE), y + 22
        parts.append(
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="14" height="14" fill="{fill}"/>'
        )
        parts.append(svg_text(x + 20, y + 12, word))
        x += wide
    return parts, x, y
