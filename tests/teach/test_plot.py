"""Curves land where their values are, in the terminal and in the SVG, and nothing is wider than asked."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from shoal.teach.drawings.plot import (
    ASCII_SIGNS,
    SIGNS,
    Chart,
    PlotAxis,
    Series,
    make_scale,
    plot_lines,
    tick_text,
)
from shoal.teach.drawings.plot_svg import plot_svg

SVG = "{http://www.w3.org/2000/svg}"


def chart(
    *series: Series, x: PlotAxis | None = None, y: PlotAxis | None = None, **more: object
) -> Chart:
    return Chart(x or PlotAxis("time, s"), y or PlotAxis("bytes"), series, **more)


def cells(lines: list[str], sign: str) -> list[tuple[int, int]]:
    """(row, column) of a sign in the plot's own rows."""
    rows = [line for line in lines if "┤" in line or "│" in line]
    start = next(line for line in rows if "┤" in line).index("┤") + 1
    return [
        (row, column - start)
        for row, line in enumerate(rows)
        for column, character in enumerate(line)
        if character == sign
    ]


def test_points_land_where_their_values_are() -> None:
    dots = Series("a", ((0, 0), (5, 50), (10, 100)), dots=True)
    found = cells(plot_lines(chart(dots), width=60, height=11), SIGNS[0])
    width = max(column for _, column in found)
    assert sorted(found) == [(0, width), (5, width // 2), (10, 0)] or sorted(found) == [
        (0, width), (5, -(-width // 2)), (10, 0)
    ]  # fmt: skip


def test_equal_factors_are_equal_steps_on_a_logarithmic_axis() -> None:
    dots = Series("a", tuple((10.0**k, 2.0**k) for k in range(5)), dots=True)
    both = chart(dots, x=PlotAxis("n", log=True), y=PlotAxis("t", log=True))
    found = sorted(cells(plot_lines(both, width=80, height=13), SIGNS[0]), key=lambda p: p[1])
    steps = [b[1] - a[1] for a, b in zip(found, found[1:], strict=False)]
    rows = [a[0] - b[0] for a, b in zip(found, found[1:], strict=False)]
    assert max(steps) - min(steps) <= 1
    assert rows == [3, 3, 3, 3]


def test_a_line_has_a_sign_in_every_column_between_its_points() -> None:
    line = Series("a", ((0, 0), (1, 1)))
    found = cells(plot_lines(chart(line), width=50, height=20), SIGNS[0])
    columns = {column for _, column in found}
    assert columns == set(range(max(columns) + 1))


def test_the_first_series_is_drawn_over_the_others() -> None:
    same = ((0, 0), (1, 1))
    lines = plot_lines(chart(Series("a", same), Series("b", same)), width=50)
    assert not cells(lines, SIGNS[1])
    assert f"{SIGNS[0]} a   {SIGNS[1]} b" in "\n".join(lines)


@pytest.mark.parametrize("width", [30, 80, 100])
def test_no_line_is_wider_than_asked(width: int) -> None:
    many = [Series(f"series number {k}", ((1, k), (9e9, 2 * k))) for k in range(6)]
    drawn = chart(*many, x=PlotAxis("x", log=True), title="t", marks=((50, "here"), (5e8, "there")))
    assert max(map(len, plot_lines(drawn, width=width))) <= width


def test_marks_are_drawn_and_named() -> None:
    lines = plot_lines(chart(Series("a", ((0, 0), (10, 1))), marks=((5, "best"),)), width=60)
    assert len(cells(lines, "┊")) >= 10
    assert "┊ 5: best" in "\n".join(lines)


def test_plain_signs_where_the_terminal_knows_no_others() -> None:
    two = chart(Series("a", ((0, 0), (1, 1))), Series("b", ((0, 1), (1, 0))), marks=((0.5, "m"),))
    text = "\n".join(plot_lines(two, ascii_only=True))
    assert text.isascii()
    assert ASCII_SIGNS[0] in text
    assert ASCII_SIGNS[1] in text


def test_what_no_axis_can_show_is_left_out() -> None:
    odd = Series("a", ((0, 1), (1, math.inf), (1, math.nan), (10, 10), (100, 100)), dots=True)
    drawn = chart(odd, x=PlotAxis("x", log=True), y=PlotAxis("y", log=True))
    assert len(cells(plot_lines(drawn), SIGNS[0])) == 2
    cut = chart(
        Series("a", ((0, 0), (1, 1), (2, 9)), dots=True), y=PlotAxis("y", low=0.0, high=2.0)
    )
    assert len(cells(plot_lines(cut), SIGNS[0])) == 2


@pytest.mark.parametrize("points", [(), ((1.0, 1.0),), ((2.0, 5.0), (3.0, 5.0))])
def test_no_point_one_point_and_a_flat_line_can_be_drawn(
    points: tuple[tuple[float, float], ...],
) -> None:
    for log in (False, True):
        drawn = chart(Series("a", points), x=PlotAxis("x", log=log), y=PlotAxis("y", log=log))
        assert plot_lines(drawn)[0] == "y"
        ElementTree.fromstring(plot_svg(drawn))


def test_ticks_are_round_numbers_within_the_axis() -> None:
    for low, high in ((0.0, 0.83), (3.0, 17.0), (-5.0, 5.0), (1e6, 1.2e6)):
        scale = make_scale(PlotAxis("t"), [low, high], 6)
        assert scale.low <= low <= high <= scale.high
        assert 2 <= len(scale.ticks) <= 9
        step = scale.ticks[1] - scale.ticks[0]
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(mantissa - m) for m in (1, 2, 2.5, 5)) < 1e-6
    for low, high in ((1.0, 1e9), (3.0, 40.0), (0.002, 7.0)):
        for base in (2, 10):
            ticks = make_scale(PlotAxis("t", log=True, base=base), [low, high], 6).ticks
            assert all(low <= tick <= high for tick in ticks)
            assert len(ticks) <= 7


def test_ticks_say_themselves() -> None:
    for value in (0.25, 3.0, 1024.0, 65536.0, 131072.0, 2.5e9):
        text = tick_text(value)
        scale = {"K": 1e3, "M": 1e6, "B": 1e9}.get(text[-1], 1.0)
        assert float(text.rstrip("KMB")) * scale == pytest.approx(value, rel=0.01)


def test_the_svg_is_whole_and_needs_nothing_else() -> None:
    drawn = chart(
        Series("a < b & c", ((0, 0), (10, 5))),
        Series("dots", ((0, 5), (5, 0)), dots=True),
        marks=((5, "best"),),
        title='a "title"',
    )
    text = plot_svg(drawn)
    root = ElementTree.fromstring(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert {"a < b & c", "dots", "best", "time, s", "bytes", 'a "title"'} <= set(words)
    assert len(list(root.iter(f"{SVG}circle"))) == 3, "two dots and the legend's"
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for line in root.iter(f"{SVG}polyline"):
        for pair in line.get("points", "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_svg_points_keep_their_proportions() -> None:
    root = ElementTree.fromstring(plot_svg(chart(Series("a", ((0, 0), (5, 25), (10, 100))))))
    line = next(root.iter(f"{SVG}polyline")).get("points", "")
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, p.split(","))) for p in line.split())
    assert (x1 - x0) / (x2 - x0) == pytest.approx(0.5, abs=1e-3)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(0.25, abs=1e-3)


def test_of_two_equal_curves_both_show_in_the_svg() -> None:
    same = ((0, 0), (1, 1))
    root = ElementTree.fromstring(plot_svg(chart(Series("a", same), Series("b", same))))
    first, second = root.iter(f"{SVG}polyline")
    assert first.get("stroke-dasharray") == "none"
    assert second.get("stroke-dasharray") not in (None, "none")
