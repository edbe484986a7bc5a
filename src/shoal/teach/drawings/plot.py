"""Draw a few curves as text in a terminal of 100 columns; `plot_svg.py` draws the same as SVG.

A chart is data: titled axes (with their unit in the title, linear or logarithmic), series of points
in the order of x, and marks at notable places of the x-axis. In the terminal every series has its
own character, so that nothing depends on colour. Points outside a logarithmic axis (0 and less) and
infinite ones are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

SIGNS = "●○◆◇▲△"
ASCII_SIGNS = "*o+x#%"


@dataclass(frozen=True)
class PlotAxis:
    """Title of an axis with its unit; `log` for a logarithmic one; `low`, `high` if fixed.

    Attributes:
        base: of the ticks of a logarithmic axis: 10 (1, 2, 5, 10, …) or 2 (1, 2, 4, 8, …).
    """

    title: str
    log: bool = False
    base: int = 10
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """A named curve: points (x, y) in the order of x. `dots`: points that no line joins."""

    label: str
    points: tuple[tuple[float, float], ...]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Axes, curves, and marks (x, label)."""

    x: PlotAxis
    y: PlotAxis
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()
    title: str = ""


@dataclass(frozen=True)
class AxisScale:
    """Map from an axis's values to 0–1, with the values of its ticks."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def contains(self, value: float) -> bool:
        """Return whether the axis can show the value."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return False
        return -1e-9 <= self.at(value) <= 1 + 1e-9

    def at(self, value: float) -> float:
        """Return the position of a value between 0 and 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def tick_text(value: float) -> str:
    """Format a tick as briefly as is exact.

    >>> [tick_text(v) for v in (0, 0.05, 0.5, 20, 1500.5, 16384, 2.5e6, 1e-4)]
    ['0', '0.05', '0.5', '20', '1.5K', '16384', '2.5M', '1e-4']
    """
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def make_scale(axis: PlotAxis, values: Iterable[float], most_ticks: int) -> AxisScale:
    """Return the axis for values: a linear one ends on ticks unless its ends are fixed.

    >>> make_scale(PlotAxis("t"), [0.0, 0.83], 5).ticks
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    >>> make_scale(PlotAxis("n", log=True), [2, 900], 5).ticks
    (10.0, 100.0)
    >>> make_scale(PlotAxis("n", log=True, base=2), [2, 900], 5).ticks
    (2.0, 8.0, 32.0, 128.0, 512.0)
    """
    shown = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)]
    low = axis.low if axis.low is not None else min(shown, default=1.0)
    high = axis.high if axis.high is not None else max(shown, default=10.0)
    if axis.log:
        return _log_scale(axis, low, high, most_ticks)
    if axis.low is None and 0 < low < 0.4 * high:
        low = 0.0
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(2, most_ticks)
    step = 10 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw * (1 - 1e-9))
    if axis.low is None:
        low = math.floor(low / step + 1e-9) * step
    if axis.high is None:
        high = math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return AxisScale(low, high, False, tuple(round((first + i) * step, 12) for i in range(count)))


def _log_scale(axis: PlotAxis, low: float, high: float, most_ticks: int) -> AxisScale:
    """Return a logarithmic axis with the given ends and at most `most_ticks` ticks."""
    if high <= low:
        high = low * 10
    kinds = [(1, 2, 5), (1,)] if axis.base == 10 else [(1,)]
    powers = range(
        math.floor(math.log(low, axis.base)) - 1, math.ceil(math.log(high, axis.base)) + 2
    )
    ticks: list[float] = []
    for kind in kinds:
        every = sorted(m * float(axis.base) ** power for power in powers for m in kind)
        ticks = [t for t in every if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(ticks) <= most_ticks + 1:
            break
    thin = -(-len(ticks) // (most_ticks + 1)) or 1
    return AxisScale(low, high, True, tuple(float(f"{t:.12g}") for t in ticks[::thin]))


def make_scales(chart: Chart, x_ticks: int, y_ticks: int) -> tuple[AxisScale, AxisScale]:
    """Return both axes of a chart."""
    points = [point for series in chart.series for point in series.points]
    marked = [place for place, _ in chart.marks]
    x = make_scale(chart.x, [p[0] for p in points] + marked, x_ticks)
    return x, make_scale(chart.y, [p[1] for p in points if math.isfinite(p[1])], y_ticks)


def visible_points(series: Series, x: AxisScale, y: AxisScale) -> list[tuple[float, float]]:
    """Return the positions (0–1, 0–1) of the points that the axes can show."""
    return [(x.at(px), y.at(py)) for px, py in series.points if x.contains(px) and y.contains(py)]


def plot_lines(
    chart: Chart, width: int = 100, height: int = 14, ascii_only: bool = False
) -> list[str]:
    r"""Draw the chart as lines of at most `width` columns: title, curves, axis, marks, legend.

    >>> line = Chart(PlotAxis("x"), PlotAxis("y"), (Series("a", ((0, 0), (4, 4))),))
    >>> print("\n".join(plot_lines(line, width=24, height=5)))
    y
    4 ┤                 ●●●
      │            ●●●●●
    2 ┤        ●●●●
      │   ●●●●●
    0 ┤●●●
      └┬─────────┬────────┬
       0         2        4
      x
    """
    x, y = make_scales(chart, max(2, width // 12), max(2, height // 3))
    signs = ASCII_SIGNS if ascii_only else SIGNS
    labels = _row_labels(y, height)
    margin = max((len(text) for text in labels.values()), default=1) + 1
    columns = width - margin - 2
    grid = [[" "] * columns for _ in range(height)]
    for place, _ in chart.marks:
        if x.contains(place):
            _put_sign(grid, round(x.at(place) * (columns - 1)), ":" if ascii_only else "┊")
    for series, sign in reversed(list(zip(chart.series, signs * 9, strict=False))):
        _draw_curve(grid, series, sign, x, y)
    wall, tick = ("|", "+") if ascii_only else ("│", "┤")
    lines = [chart.title] if chart.title else []
    lines.append(chart.y.title)
    for row in range(height):
        label = labels.get(row, "")
        lines.append(
            f"{label:>{margin - 1}} {tick if label else wall}{''.join(grid[row])}".rstrip()
        )
    lines += _x_axis_lines(chart, x, margin, columns, ascii_only)
    if len(chart.series) > 1:
        named = [f"{sign} {s.label}" for s, sign in zip(chart.series, signs * 9, strict=False)]
        lines += _wrap_words(named, width - margin, " " * margin)
    return [line[:width] for line in lines]


def _row_labels(y: AxisScale, height: int) -> dict[int, str]:
    """Return row → text of its tick; rows count from the top."""
    return {height - 1 - round(y.at(t) * (height - 1)): tick_text(t) for t in y.ticks}


def _put_sign(grid: list[list[str]], column: int, sign: str) -> None:
    for row in grid:
        row[column] = sign


def _draw_curve(
    grid: list[list[str]], series: Series, sign: str, x: AxisScale, y: AxisScale
) -> None:
    """Draw one character per column along straight lines between points; fill steep parts."""
    height, columns = len(grid), len(grid[0])

    def cell(place: tuple[float, float]) -> tuple[int, float]:
        return round(place[0] * (columns - 1)), (1 - place[1]) * (height - 1)

    cells = [cell(place) for place in visible_points(series, x, y)]
    for column, row in cells:
        grid[round(row)][column] = sign
    if series.dots:
        return
    for (c0, r0), (c1, r1) in zip(cells, cells[1:], strict=False):
        steps = max(abs(c1 - c0), round(abs(r1 - r0)), 1)
        for step in range(steps + 1):
            part = step / steps
            grid[round(r0 + (r1 - r0) * part)][round(c0 + (c1 - c0) * part)] = sign


def _x_axis_lines(
    chart: Chart, x: AxisScale, margin: int, columns: int, ascii_only: bool
) -> list[str]:
    """Return the x-axis: its line with ticks, their texts, the names of the marks, the title."""
    corner, flat, down = ("+", "-", "+") if ascii_only else ("└", "─", "┬")
    line = [flat] * columns
    texts = [" "] * (columns + 8)
    free = 0
    for value in x.ticks:
        place = round(x.at(value) * (columns - 1))
        line[place] = down
        text = tick_text(value)
        start = max(0, min(place - len(text) // 2, columns + 1 - len(text)))
        if start >= free:
            texts[start : start + len(text)] = text
            free = start + len(text) + 1
    pad = " " * margin
    lines = [f"{pad}{corner}{''.join(line)}", f"{pad} {''.join(texts)}".rstrip()]
    lines.append(f"{pad}{chart.x.title}")
    marked = [f"{tick_text(place)}: {text}" for place, text in chart.marks]
    if marked:
        sign = ":" if ascii_only else "┊"
        lines += _wrap_words([f"{sign} {text}" for text in marked], columns, pad)
    return lines


def _wrap_words(words: list[str], width: int, pad: str) -> list[str]:
    """Pack texts side by side, three blanks apart, in as few lines as possible."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + 3 + len(word) > width:
            lines.append(pad + line)
            line = ""
        line = f"{line}   {word}" if line else word
    return [*lines, pad + line] if line else lines
