"""Curves of letters: a plot in several rows, with two axes.

It uses braille letters, 2 × 4 dots in each column, or one asterisk a column where the
terminal's encoding has none. A dot is the mean of the values in its columns of steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shoal.view.watch.styled_lines import Line

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of a braille letter by row and column."""
LABEL_WIDTH = 8
Point = tuple[float, float]
"""(step, value)"""


def draw_curve(
    points: Sequence[Point],
    width: int,
    height: int,
    *,
    braille: bool = True,
    log: bool = False,
    marks: Sequence[Point] = (),
) -> list[Line]:
    """Return a plot as exactly `height` lines: the curve, and the steps below it.

    Args:
        points: step and value, by step.
        width: columns, of which the labels take some.
        height: lines, at least 3; the last one has the steps.
        braille: False: ASCII only.
        log: logarithmic values, if all are above 0.
        marks: further values, each drawn as an "o".
    """
    rows, columns = height - 1, width - LABEL_WIDTH - 1
    finite = [p for p in points if math.isfinite(p[1])]
    if rows < 2 or columns < 4 or not finite:
        return [()] * height
    marks = [p for p in marks if math.isfinite(p[1])]
    log = log and all(value > 0 for _, value in (*finite, *marks))
    scale = math.log if log else float
    values = [scale(value) for _, value in (*finite, *marks)]
    low, high = min(values), max(values)
    first, last = finite[0][0], max(finite[-1][0], finite[0][0] + 1)
    fine_x, fine_y = (2, 4) if braille else (1, 1)
    across, up = columns * fine_x, rows * fine_y

    def row_of(value: float) -> int:
        share = (scale(value) - low) / (high - low) if high > low else 0.5
        return min(up - 1, max(0, up - 1 - round(share * (up - 1))))

    def column_of(step: float, count: int) -> int:
        return min(count - 1, max(0, int((step - first) / (last - first) * (count - 1) + 0.5)))

    dots = _draw_dots(_average(finite, across, column_of), row_of)
    letters = _draw_letters(dots, rows, columns, braille)
    spans: list[list[tuple[str, str]]] = [[(row, "cyan")] for row in letters]
    for step, value in marks:
        if first <= step <= last:
            _put_mark(spans, row_of(value) // fine_y, column_of(step, columns))
    labels = _axis_labels(low, high, rows, log)
    lines: list[Line] = [
        ((f"{label:>{LABEL_WIDTH}} ", "dim"), *row)
        for label, row in zip(labels, spans, strict=True)
    ]
    left, right = f"{first:.0f}", f"{last:.0f}"
    middle = " " * max(1, columns - len(left) - len(right))
    lines.append(((f"{' log' if log else 'step':>{LABEL_WIDTH}} {left}{middle}{right}", "dim"),))
    return lines


def _average(
    points: Sequence[Point], across: int, column_of: Callable[[float, int], int]
) -> list[tuple[int, float]]:
    """Return the mean value of each column that has any."""
    sums: dict[int, list[float]] = {}
    for step, value in points:
        sums.setdefault(column_of(step, across), []).append(value)
    return [(column, math.fsum(sums[column]) / len(sums[column])) for column in sorted(sums)]


def _draw_dots(
    points: Sequence[tuple[int, float]], row_of: Callable[[float], int]
) -> set[tuple[int, int]]:
    """Return (column, row) of the dots of a line through the points."""
    dots: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for column, value in points:
        here = (column, row_of(value))
        start = before or here
        length = max(1, here[0] - start[0])
        last_row = start[1]
        for x in range(start[0], here[0] + 1):
            y = round(start[1] + (here[1] - start[1]) * (x - start[0]) / length)
            dots.update((x, between) for between in range(min(last_row, y), max(last_row, y) + 1))
            last_row = y
        before = here
    return dots


def _draw_letters(dots: set[tuple[int, int]], rows: int, columns: int, braille: bool) -> list[str]:
    """Return the rows of letters that have these dots."""
    letters = [[" "] * columns for _ in range(rows)]
    if not braille:
        for x, y in dots:
            letters[y][x] = "*"
        return ["".join(row) for row in letters]
    bits: dict[tuple[int, int], int] = {}
    for x, y in dots:
        cell = (y // 4, x // 2)
        bits[cell] = bits.get(cell, 0) | DOTS[y % 4][x % 2]
    for (row, column), found in bits.items():
        letters[row][column] = chr(0x2800 + found)
    return ["".join(row) for row in letters]


def _put_mark(spans: list[list[tuple[str, str]]], row: int, column: int) -> None:
    text = "".join(part for part, _ in spans[row])
    styles = [style for part, style in spans[row] for _ in part]
    letters, styles = list(text), list(styles)
    letters[column], styles[column] = "o", "bold yellow"
    spans[row] = []
    for letter, style in zip(letters, styles, strict=True):
        if spans[row] and spans[row][-1][1] == style:
            spans[row][-1] = (spans[row][-1][0] + letter, style)
        else:
            spans[row].append((letter, style))


def _axis_labels(low: float, high: float, rows: int, log: bool) -> list[str]:
    def text(share: float) -> str:
        value = low + share * (high - low)
        return format_short(math.exp(value) if log else value)

    labels = [""] * rows
    labels[0], labels[-1] = text(1.0), text(0.0)
    if rows >= 5:
        labels[rows // 2] = text(1 - (rows // 2) / (rows - 1))
    return labels


def format_short(value: float) -> str:
    """Format a value in at most eight columns.

    >>> format_short(6.04781), format_short(123456.0), format_short(0.00012)
    ('6.048', '1.23e+05', '0.00012')
    """
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-4:
        return f"{value:.2e}"
    return f"{value:.4g}"
