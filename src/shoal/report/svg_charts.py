"""Charts as SVG in HTML frames: they scale to any width, their texts do not.

    ┌ title ───────────────────────────┐
    │ labels │ plot, stretched: 1000 × │   the plot has no text; labels stand at percentages in
    │ of y   │ 300 units, lines keep   │   SVGs of their own, so a phone shows them at full size
    │        │ their width             │
    └────────┴ labels of x ────────────┘

No element has a style attribute, which the page's content security policy forbids. Colours are
classes of `assets/report.css`, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.base.text.units import bytes_text, count_text, seconds_text
from shoal.report.markup import Child, Markup, tag
from shoal.report.metric_series import SampledSeries

WIDTH, HEIGHT = 1000, 300
"""Units of a plot, stretched to the frame."""
Mark = tuple[float, float]
"""A position from 0 to 1 along an axis, and the value there."""


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart.

    Attributes:
        label: its name, in the legend if there are several lines.
        xs, ys: points, by ascending x.
        faint: drawn thin behind the others.
        number: of its colour; None: as its label among those of the chart.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    faint: bool = False
    number: int | None = None


def number_label(value: float) -> str:
    """Return a number for an axis: at most four digits.

    >>> number_label(0.25), number_label(12000), number_label(3e-05), number_label(0)
    ('0.25', '12K', '3e-05', '0')
    """
    if value == 0:
        return "0"
    if 1e3 <= abs(value) < 1e15:
        return count_text(value).replace(".0", "")
    return f"{value:.4g}"


def byte_label(value: float) -> str:
    """Return bytes for an axis."""
    return bytes_text(value).replace(".0 ", " ")


def second_label(value: float) -> str:
    """Return seconds for an axis.

    >>> second_label(0), second_label(0.05), second_label(2)
    ('0', '50 ms', '2 s')
    """
    return seconds_text(value).replace(".0 ", " ") if value else "0"


def round_ticks(least: float, most: float, count: int = 5, base: float = 10.0) -> list[float]:
    """Return round values from at most `least` to at least `most`, evenly spaced.

    Args:
        base: 10, or 2 for bytes.

    >>> round_ticks(0.3, 9.1), round_ticks(5, 5)
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [4.0, 5.0, 6.0])
    """
    if not math.isfinite(most - least):
        return [least, most]
    if most - least <= 1e-9 * abs(most):  # equal, or closer than labels can tell
        pad = abs(least) * 0.2 or 1.0
        return [float(least - pad), float(least), float(least + pad)]
    rough = max((most - least) / count, 1e-300)
    unit = base ** math.floor(math.log(rough, base))
    factors = (1, 2, 2.5, 5, 10) if base == 10 else (1, 2)
    step = next((f * unit for f in factors if f * unit >= rough * 0.999), base * unit)
    first, last = math.floor(least / step + 1e-9), math.ceil(most / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def spread_marks(least: float, most: float, count: int = 4) -> list[Mark]:
    """Return round values inside of a range with their positions, for an axis that ends exactly."""
    if not most > least or not math.isfinite(most - least):
        return [(0.0, least)]
    inside = [value for value in round_ticks(least, most, count) if least <= value <= most]
    return [((value - least) / (most - least), value) for value in inside]


def colour_class(number: int) -> str:
    """Return the CSS classes of a line's colour; after eight colours they repeat, dashed.

    >>> colour_class(3), colour_class(19)
    ('s3', 's3 d2')
    """
    return f"s{number % 8}" + (f" d{number // 8 % 3}" if number >= 8 else "")


def sampled_lines(label: str, series: SampledSeries) -> list[ChartLine]:
    """Return the lines of a series: its points, or faint extremes and the mean of groups."""
    points = ChartLine(label, series.steps, series.values, faint=bool(series.means))
    mean = ChartLine(label, series.mean_steps, series.means)
    return [points, mean] if series.means else [points]


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    x_title: str,
    y_label: Callable[[float], str] = number_label,
    marks: Sequence[float] = (),
    starts: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Return a line chart.

    Args:
        title: with the unit.
        lines: several have a legend.
        x_title: below.
        y_label: text of a value at the axis.
        marks: x of events, drawn as ticks at the top, which hide no spike.
        starts: x and name of later starts, drawn as thin lines behind the curves.
    """
    shown = [line for line in lines if len(line.xs)]
    if not shown:
        return Markup("")
    left, right = min(line.xs[0] for line in shown), max(line.xs[-1] for line in shown)
    ticks = round_ticks(
        min(min(line.ys) for line in shown),
        max(max(line.ys) for line in shown),
        base=2.0 if y_label is byte_label else 10.0,
    )
    low, high = ticks[0], ticks[-1]
    wide, tall = (right - left) or 1.0, (high - low) or 1.0
    y_marks = [(1 - (value - low) / tall, value) for value in ticks]
    parts = [_grid_line(position) for position, _ in y_marks]
    placed = [((x - left) / wide, name) for x, name in starts if left < x < right]
    parts += [_start_line(position) for position, _ in placed]
    parts += [_mark_line((x - left) / wide) for x in marks if left <= x <= right]
    names = list(dict.fromkeys(line.label for line in shown))
    for line in shown:
        number = names.index(line.label) if line.number is None else line.number
        points = " ".join(
            f"{(x - left) / wide * WIDTH:.0f},{(1 - (y - low) / tall) * HEIGHT:.0f}"
            for x, y in zip(line.xs, line.ys, strict=True)
        )
        look = f"line {colour_class(number)}{' faint' if line.faint else ''}"
        if len(line.xs) == 1:
            y = (1 - (line.ys[0] - low) / tall) * HEIGHT
            points = f"0,{y:.0f} {WIDTH},{y:.0f}"
        parts.append(tag("polyline", class_=look, points=Markup(points)))
    legend = [
        tag("span", tag("i", class_=f"key s{number % 8}"), name)
        for number, name in enumerate(names)
        if len(names) > 1
    ]
    plot = tag(
        "svg", parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img",
        aria_label=title,
    )  # fmt: skip
    if placed:
        texts = [
            tag("text", name, x=f"{100 * at:.2f}%", y="12", dx="-4" if at > 0.5 else "4",
                class_="last" if at > 0.5 else None)
            for at, name in placed
        ]  # fmt: skip
        plot = Markup(plot + tag("svg", texts, class_="starts", aria_hidden="true"))
    x_marks = spread_marks(left, right)
    return chart_frame(
        title,
        plot,
        [(position, y_label(value)) for position, value in y_marks],
        [(position, number_label(value)) for position, value in x_marks],
        x_title=x_title,
        legend=legend,
    )


def chart_frame(
    title: str,
    plot: Markup,
    y_marks: Sequence[tuple[float, str]],
    x_marks: Sequence[tuple[float, str]],
    *,
    x_title: str,
    legend: Sequence[Markup] = (),
    size: str = "tall",
    note: Child = None,
) -> Markup:
    """Return a figure: title, axis labels around a plot, and a note below.

    Args:
        title: with the unit.
        plot: an SVG or an image that fills its cell.
        y_marks: position from the top, text.
        x_marks: position from the left, text.
        x_title: below the axis.
        legend: names of lines with their colours.
        size: CSS class of the height: low, mid, tall or high.
        note: a sentence below.
    """
    y_axis = [tag("text", text, x="100%", y=f"{100 * at:.2f}%", dy=".32em") for at, text in y_marks]
    x_axis = [
        tag("text", text, x=f"{100 * at:.2f}%", y="12", class_=_anchor(at)) for at, text in x_marks
    ]
    frame = tag(
        "div",
        [
            tag("div", tag("svg", y_axis, aria_hidden="true"), class_="y"),
            tag("div", plot, class_="plot"),
            tag("div", tag("svg", x_axis, aria_hidden="true"), class_="x"),
            tag("div", x_title, class_="xt"),
        ],
        class_=f"frame {size}",
    )
    parts: list[Child] = [tag("figcaption", title), frame]
    if legend:
        parts.insert(1, tag("div", legend, class_="legend"))
    if note:
        parts.append(tag("p", note, class_="note"))
    return tag("figure", parts)


def stacked_bar(parts: Sequence[tuple[str, float]], whole: float, text: str) -> Markup:
    """Return a horizontal bar of parts, stretched to its cell; `whole` is the longest bar.

    Args:
        parts: class of the colour, size.
        whole: size of a full bar.
        text: for screen readers and as a tooltip.
    """
    boxes, at = [], 0.0
    for look, size in parts:
        wide = size / whole * WIDTH if whole > 0 else 0.0
        if wide >= 0.5:
            boxes.append(
                tag("rect", x=f"{at:.0f}", y="0", width=f"{wide:.1f}", height="10", class_=look)
            )
        at += wide
    return tag(
        "svg", tag("title", text), boxes, viewBox=f"0 0 {WIDTH} 10", preserveAspectRatio="none",
        class_="bar", role="img",
    )  # fmt: skip


def _grid_line(position: float) -> Markup:
    y = f"{position * HEIGHT:.1f}"
    return tag("line", class_="grid", x1="0", x2=str(WIDTH), y1=y, y2=y)


def _mark_line(position: float) -> Markup:
    x = f"{position * WIDTH:.1f}"
    return tag("line", class_="mark", x1=x, x2=x, y1="0", y2=str(HEIGHT // 12))


def _start_line(position: float) -> Markup:
    x = f"{position * WIDTH:.1f}"
    return tag("line", class_="start", x1=x, x2=x, y1="0", y2=str(HEIGHT))


def _anchor(position: float) -> str:
    return "first" if position < 0.04 else "last" if position > 0.96 else "middle"
