"""The screen of one calculator: formulas with numbers put in, a plot, an explanation.

A screen is data, so that the same answer can be printed, saved as SVG, or returned as JSON.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

from shoal.base.runlog.damaged_lines import replace_non_finite
from shoal.teach.drawings.plot import Chart, plot_lines

BAR = "█"
LEAST_ROOM = 20
"""Least columns of a formula, however long its name and its result are."""

PLAIN = str.maketrans({
    "−": "-", "–": "-", "·": "*", "×": "x", "√": "sqrt", "∫": "integral ", "≈": "~", "≥": ">=",
    "±": "+-", "₁": "1", "ⁿ": "^n", "⅓": "1/3 ", "…": "...", "←": "<-", "─": "-", "∞": "inf",
    "α": "alpha", "β": "beta", "τ": "tau", "ε": "eps", "█": "#", "\xa0": " ",
})  # fmt: skip
"""Characters that an ASCII terminal lacks → their spelling."""


@dataclass(frozen=True)
class Formula:
    """One line: a name, the formula with letters = with numbers, and the result with a unit."""

    name: str
    text: str
    result: str


@dataclass(frozen=True)
class Screen:
    """Answer of a calculator.

    Attributes:
        results: the figures, plain, for JSON.
        letters: meaning of the formulas' letters.
        table: rows of cells, the first one the head; numbers to the right.
        bars: name → share of the whole, drawn as bars.
    """

    title: str
    formulas: tuple[Formula, ...]
    results: dict[str, Any]
    meaning: str
    source: str
    chart: Chart
    table: tuple[tuple[str, ...], ...] = ()
    bars: dict[str, float] = field(default_factory=dict)
    letters: str = ""
    following: str = ""


def screen_lines(screen: Screen, width: int = 100, ascii_only: bool = False) -> list[str]:
    """Return the screen as lines of at most `width` columns.

    >>> from shoal.teach.drawings.plot import PlotAxis, Series
    >>> chart = Chart(PlotAxis("x"), PlotAxis("y"), (Series("a", ((0, 0), (1, 1))),))
    >>> rows = (Formula("total", "a + b = 1 + 2", "3 s"),)
    >>> one = Screen("Sum", rows, {}, "It is 3.", "", chart)
    >>> screen_lines(one, width=40)[:3]
    ['Sum', '', '  total   a + b = 1 + 2              3 s']
    """
    lines = [*textwrap.wrap(screen.title, width), ""]
    name_width = max((len(f.name) for f in screen.formulas), default=0)
    for formula in screen.formulas:
        lines += _formula_lines(formula, name_width, width)
    if screen.letters:
        lines += textwrap.wrap(f"  where {screen.letters}", width, subsequent_indent="  ")
    if screen.table:
        lines += ["", *table_lines(screen.table, width)]
    if screen.bars:
        lines += ["", *bar_lines(screen.bars, width)]
    height = 11 if screen.table or screen.bars else 14
    lines += [
        "",
        *("  " + line for line in plot_lines(screen.chart, width - 2, height, ascii_only)),
    ]
    lines += ["", *textwrap.wrap(screen.meaning, width)]
    lines += textwrap.wrap(f"Source: {screen.source}", width, subsequent_indent="  ")
    if screen.following:
        lines.append(f"Next: {screen.following}")
    return [line.translate(PLAIN) for line in lines] if ascii_only else lines


def _formula_lines(formula: Formula, name_width: int, width: int) -> list[str]:
    """Return the formula between its name and its result; long ones continue below."""
    room = max(LEAST_ROOM, width - name_width - len(formula.result) - 8)
    pieces = textwrap.wrap(formula.text, room) or [""]
    first = f"  {formula.name:<{name_width}}   {pieces[0]:<{room}}   {formula.result}"
    return [first, *(" " * (name_width + 5) + piece for piece in pieces[1:])]


def table_lines(table: tuple[tuple[str, ...], ...], width: int) -> list[str]:
    """Return table lines: the first column to the left, the others to the right, a ruled head.

    Last columns that do not fit are left out whole, and named below.

    >>> table_lines((("n", "s"), ("2", "10")), 40)
    ['  n    s', '  ──────', '  2   10']
    >>> table_lines((("n", "s", "bytes"), ("2", "10", "4")), 12)[-1]
    '  (no room for: bytes)'
    """
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    while len(widths) > 1 and sum(widths) + 3 * len(widths) - 1 > width:
        widths.pop()
    left_out = table[0][len(widths) :]
    table = tuple(row[: len(widths)] for row in table)
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True)]
        lines.append(("  " + "   ".join(cells))[:width].rstrip())
    rule = "  " + "─" * (max(map(len, lines)) - 2)
    note = [f"  (no room for: {', '.join(left_out)})"] if left_out else []
    return [lines[0], rule, *lines[1:], *note]


def bar_lines(bars: dict[str, float], width: int) -> list[str]:
    """Return a bar per share of the whole; a share above 0 shows at least one block.

    >>> bar_lines({"work": 0.75, "lost": 0.25}, 40)
    ['  work   75.0 %  ████████████████', '  lost   25.0 %  █████']
    """
    name_width = max(map(len, bars))
    room = width - name_width - 15
    lines = []
    for name, share in bars.items():
        signs = max(round(share * room), 1 if share > 5e-4 else 0)
        lines.append(f"  {name:<{name_width}}  {100 * share:5.1f} %  {BAR * signs}".rstrip())
    return lines


def screen_record(screen: Screen, given: dict[str, Any]) -> dict[str, Any]:
    """Return the answer as plain data for JSON: the options in use, results and curves.

    Infinite figures become null, as JSON has no infinity.
    """
    curves = {s.label: [list(point) for point in s.points] for s in screen.chart.series}
    record = {
        "title": screen.title,
        "given": given,
        "results": screen.results,
        "x": screen.chart.x.title,
        "y": screen.chart.y.title,
        "curves": curves,
        "meaning": screen.meaning,
        "source": screen.source,
    }
    return replace_non_finite(record)
