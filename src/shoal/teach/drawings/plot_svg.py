"""Draw a chart of `plot.py` as one self-contained SVG document: no font, script or style.

Every curve has a colour that most eyes can distinguish, and its name in the legend and as a
tooltip.
"""

from __future__ import annotations

from xml.sax.saxutils import escape

from shoal.teach.drawings.plot import Chart, Series, make_scales, tick_text, visible_points

COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa7700", "#aa3377", "#555555")
"""Paul Tol's bright palette, its yellow darkened for white paper."""

DASHES = ("", "8 3", "3 3", "10 3 2 3", "1 3", "14 4")
"""Later curves are drawn over earlier ones; of two equal curves both stay visible."""

QUOTES = {'"': "&quot;"}


def plot_svg(chart: Chart, width: int = 760, height: int = 440) -> str:
    """Return the chart as a self-contained SVG document; sizes in pixels."""
    x, y = make_scales(chart, width // 90, height // 60)
    left, right, top, bottom = 64, 16, 52, 74
    inner_w, inner_h = width - left - right, height - top - bottom
    head = " · ".join(text for text in (chart.title, chart.y.title) if text)

    def px(place: float) -> float:
        return round(left + place * inner_w, 1)

    def py(place: float) -> float:
        return round(top + (1 - place) * inner_h, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" role="img" '
        f'aria-label="{escape(head, QUOTES)}">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _svg_text(left, 18, chart.title, weight="bold"),
        _svg_text(left, 40, chart.y.title),
        _svg_text(left + inner_w / 2, top + inner_h + 36, chart.x.title, "middle"),
    ]
    for value in y.ticks:
        at = py(y.at(value))
        parts.append(_svg_line(left, at, left + inner_w, at, "#ddd"))
        parts.append(_svg_text(left - 6, at + 4, tick_text(value), "end"))
    for value in x.ticks:
        at = px(x.at(value))
        parts.append(_svg_line(at, top + inner_h, at, top + inner_h + 4, "#333"))
        parts.append(_svg_text(at, top + inner_h + 18, tick_text(value), "middle"))
    parts.append(_svg_line(left, top + inner_h, left + inner_w, top + inner_h, "#333"))
    for place, text in chart.marks:
        if not x.contains(place):
            continue
        at = px(x.at(place))
        parts.append(_svg_line(at, top, at, top + inner_h, "#999", dash="3 3"))
        parts.append(_svg_text(min(at + 4, left + inner_w - 6 * len(text)), top + 12, text))
    for number, series in sorted(enumerate(chart.series), key=lambda pair: pair[1].dots):
        places = [(px(a), py(b)) for a, b in visible_points(series, x, y)]
        parts.append(_svg_curve(series, places, number % len(COLOURS)))
    parts += _legend(chart.series, left, width - right, top + inner_h + 54)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(series: tuple[Series, ...], left: float, right: float, top: float) -> list[str]:
    """Return names with their colours, in as many lines as they need."""
    parts, beside = [], left
    for number, one in enumerate(series):
        length = 40 + 7 * len(one.label)
        if beside > left and beside + length > right:
            beside, top = left, top + 16
        colour = COLOURS[number % len(COLOURS)]
        if one.dots:
            parts.append(f'<circle cx="{beside + 9}" cy="{top}" r="4" fill="{colour}"/>')
        else:
            dash = DASHES[number % len(DASHES)]
            parts.append(_svg_line(beside, top, beside + 20, top, colour, wide=3, dash=dash))
        parts.append(_svg_text(beside + 23, top + 4, one.label))
        beside += length
    return parts


def _svg_curve(series: Series, places: list[tuple[float, float]], number: int) -> str:
    colour = COLOURS[number]
    if series.dots:
        return "".join(f'<circle cx="{a}" cy="{b}" r="4" fill="{colour}"/>' for a, b in places)
    points = " ".join(f"{a},{b}" for a, b in places)
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{DASHES[number] or "none"}">'
        f"<title>{escape(series.label)}</title></polyline>"
    )


def _svg_line(
    x0: float, y0: float, x1: float, y1: float, colour: str, wide: int = 1, dash: str = ""
) -> str:
    return (
        f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{colour}" '
        f'stroke-width="{wide}" stroke-dasharray="{dash or "none"}"/>'
    )


def _svg_text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )
