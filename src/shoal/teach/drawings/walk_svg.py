"""Draw a step-through as one SVG picture: a small table per step, its timeline below.

Each panel shows the tensors of each rank AFTER the step; a thick border and `←3` mark a value that
has just arrived from rank 3. Colours show how complete a cell is. Light and dark as in
`timeline_svg`.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.teach.drawings.packed_words import pack_words, wrap_words
from shoal.teach.drawings.timeline_svg import (
    NARROW,
    PROSE,
    SIDE,
    SMALL,
    TEXT,
    TITLE,
    WIDEST,
    legend_boxes,
    svg_document,
    svg_text,
    text_width,
    timeline_parts,
)
from shoal.teach.walks.walk import LOOKS, StepThrough, TableCell, WalkStep, select_steps

FILLS = {
    "own": "#e3e8ee",
    "part": "#f2e35c",
    "whole": "#5fcaa8",
    "none": "none",
    "busy": "#a8d8f2",
}
CELL, BETWEEN, GAP, LINE = 26, 28, 18, 18


def walk_svg(walk: StepThrough) -> str:
    """Return the whole step-through as the text of an SVG file."""
    cell, panel = _widths(walk)
    width, two = max(NARROW, panel + 2 * SIDE), 2 * panel + BETWEEN + 2 * SIDE
    if len(walk.steps) > 1 and width < two <= WIDEST:
        width = two
    beside = max(1, int((width - 2 * SIDE + BETWEEN) // (panel + BETWEEN)))
    parts = [svg_text(SIDE, SIDE + TITLE, walk.title, TITLE, extra='font-weight="600"')]
    y = SIDE + TITLE + 26.0
    for line in _wrap_texts(walk.story, width - 2 * SIDE):
        parts.append(svg_text(SIDE, y, line, TEXT, "faint"))
        y += LINE
    drawn, y = _legend(walk, y + 2, width)
    parts += drawn
    start = [WalkStep("start", (), walk.start)] if walk.start else []
    steps = start + [step for step in select_steps(walk) if isinstance(step, WalkStep)]
    beside = -(-len(steps) // -(-len(steps) // beside))
    pitch = (width - 2 * SIDE + GAP) / beside
    room = pitch - GAP
    for first in range(0, len(steps), beside):
        group = steps[first : first + beside]
        above = max(len(_step_lines(step, room)) for step in group)
        below = 0.0
        for place, step in enumerate(group):
            x = SIDE + place * pitch
            drawn, bottom = _panel(walk, step, (x, y), (cell, panel, room), above)
            parts += drawn
            below = max(below, bottom)
        y = below + BETWEEN
    for line in _wrap_texts([f"checked: {walk.checked}"], width - 2 * SIDE):
        parts.append(svg_text(SIDE, y, line, TEXT))
        y += LINE
    if walk.timeline is not None:
        drawn, y = timeline_parts([walk.timeline], y + 8, width)
        parts += drawn
    return svg_document(parts, width, y + SIDE - 6, walk.title)


def _widths(walk: StepThrough) -> tuple[float, float]:
    """Return the widths (of one cell, of one panel) that fit every text of the walk."""
    every = [cell for step in walk.steps for row in step.cells for cell in row]
    texts = [text_width(cell.text, TEXT) + (36 if cell.came_from is not None else 12)
             for cell in every]  # fmt: skip
    heads = [text_width(name, 12) + 8 for name in walk.columns]
    cell = max(40.0, *texts, *heads)
    label = max(text_width(name, TEXT) for name in walk.rows) + 10
    return cell, label + cell * len(walk.columns)


def _wrap_texts(texts: Sequence[str], width: float, size: float = TEXT) -> list[str]:
    letters = max(20, int(width / (size * PROSE)))
    return [line for text in texts for line in wrap_words(text, letters)]


def _step_lines(step: WalkStep, room: float) -> list[str]:
    letters = int(room / (12 * PROSE))
    return [part for line in pack_words(step.happens, " · ", letters)
            for part in wrap_words(line, letters)]  # fmt: skip


def _panel(
    walk: StepThrough,
    step: WalkStep,
    corner: tuple[float, float],
    wide: tuple[float, float, float],
    above: int,
) -> tuple[list[str], float]:
    """Draw one step's table with its text; return its parts and its lower end.

    Args:
        wide: widths of a cell, of the panel, of its text.
        above: lines of text over every table in a row.
    """
    (x, y), (cell, panel, room) = corner, wide
    parts = [svg_text(x, y + TEXT, step.title, TEXT, extra='font-weight="600"')]
    at = y + TEXT + LINE
    for place, line in enumerate(_step_lines(step, room)):
        parts.append(svg_text(x, at + place * 16, line, 12, "faint"))
    at += above * 16
    label = panel - cell * len(walk.columns)
    for place, name in enumerate(walk.columns):
        middle = x + label + (place + 0.5) * cell
        parts.append(svg_text(middle, at + 2, name, 12, "faint", 'text-anchor="middle"'))
    at += 8
    for name, row in zip(walk.rows, step.cells, strict=True):
        parts.append(svg_text(x, at + CELL / 2 + TEXT * 0.36, name))
        for place, one in enumerate(row):
            parts += _cell(one, x + label + place * cell, at, cell)
        at += CELL + 2
    at += 2
    for line in _wrap_texts([step.note] if step.note else [], room, 12):
        parts.append(svg_text(x, at + 12, line, 12, "faint"))
        at += 16
    return parts, at


def _cell(cell: TableCell, x: float, y: float, wide: float) -> list[str]:
    fresh = cell.came_from is not None
    parts = [
        f'<rect class="{"fresh" if fresh else "box"}" x="{x + 1.5:.1f}" y="{y:.1f}" '
        f'width="{wide - 3:.1f}" height="{CELL - 2}" fill="{FILLS[cell.look]}"/>'
    ]
    base = y + CELL / 2 - 1 + TEXT * 0.36
    if cell.text and not fresh:
        parts.append(
            svg_text(x + wide / 2, base, cell.text, TEXT, "inside", 'text-anchor="middle"')
        )
    elif fresh:
        parts.append(svg_text(x + 7, base, cell.text, TEXT, "inside", 'font-weight="600"'))
        origin = f"←{cell.came_from}"
        parts.append(svg_text(x + wide - 5, base, origin, SMALL - 1, "inside", 'text-anchor="end"'))
    return parts


def _legend(walk: StepThrough, y: float, width: float) -> tuple[list[str], float]:
    every = [cell for step in walk.steps for row in step.cells for cell in row]
    present = {cell.look for cell in every}
    says = {**LOOKS, **walk.looks}
    kinds = [(says[name], FILLS[name]) for name in LOOKS if name in present]
    parts, x, y = legend_boxes(kinds, y, width)
    if any(cell.came_from is not None for cell in every):
        parts.append(svg_text(x, y + 12, "←3 just came from rank 3"))
    return parts, y + 36
