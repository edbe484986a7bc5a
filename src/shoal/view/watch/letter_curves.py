"""Curves of letters: a sparkline in one row, and a plot in several with two axes.

A plot uses braille letters, 2 × 4 dots in each column, or one asterisk a column where the
terminal's encoding has none. A dot is the mean of the values in its columns of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.view.watch.styled_lines import Line

BLOCKS = "▁▂▃▄▅▆▇█"
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of a braille letter by row and column."""
LABEL_WIDTH = 8
Point = tuple[float, float]
"""(step, value)"""


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as blocks of eight heights, averaged into at most `width` of them.

    >>> draw_sparkline([8, 7, 5, 3, 2, 1], 6), draw_sparkline([1.0, 1.0], 4)
    ('█▇▅▃▂▁', '▁▁')
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    edges = [len(finite) * place // count for place in range(count + 1)]
    means = [
        math.fsum(finite[first:last]) / (last - first)
        for first, last in zip(edges, edges[1:], strict=False)
    ]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


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

    grid = _draw_dots(_average(finite, across, column_of), row_of, across, up)
    letters = _braille_rows(grid, rows, columns) if braille else _ascii_rows(grid)
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


def _average(points: Sequence[Point], across: int, column_of: object) -> list[Point]:
    sums: dict[int, list[float]] = {}
    for step, value in points:
        one = sums.setdefault(column_of(step, across), [0.0, 0.0])  # type: ignore[operator]
        one[0] += value
        one[1] += 1
    return [(column, sums[column][0] / sums[column][1]) for column in sorted(sums)]


def _draw_dots(points: Sequence[Point], row_of: object, across: int, up: int) -> list[bytearray]:
    """Return the dots of a line through the points, by row and column."""
    grid = [bytearray(across) for _ in range(up)]
    before: tuple[int, int] | None = None
    for column, value in points:
        here = (int(column), row_of(value))  # type: ignore[operator]
        start = before or here
        length = max(1, here[0] - start[0])
        last_row = start[1]
        for x in range(start[0], here[0] + 1):
            y = round(start[1] + (here[1] - start[1]) * (x - start[0]) / length)
            for between in range(min(last_row, y), max(last_row, y) + 1):
                grid[between][x] = 1
            last_row = y
        before = here
    return grid


def _braille_rows(grid: Sequence[bytearray], rows: int, columns: int) -> list[str]:
    found = []
    for row in range(rows):
        letters = []
        for column in range(columns):
            bits = 0
            for y in range(4):
                for x in range(2):
                    if grid[4 * row + y][2 * column + x]:
                        bits |= DOTS[y][x]
            letters.append(chr(0x2800 + bits) if bits else " ")
        found.append("".join(letters))
    return found


def _ascii_rows(grid: Sequence[bytearray]) -> list[str]:
    return ["".join("*" if dot else " " for dot in row) for row in grid]


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
