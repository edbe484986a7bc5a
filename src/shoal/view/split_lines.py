"""A layout's split of a model as text: one line per parameter, equal blocks folded into one.

    parameter                  axis  first rank holds     what travels · why
    blocks.0–3.gate.weight     tp    rows 0:352 of 704    all_reduce of the input's gradient
    norm.weight                      whole                every rank needs all of it

`blocks.0–3.…` stands for four parameters that are equal in everything else. All of it comes from
base/plans/parameter_splits.py, at most 100 columns wide.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TextIO, TypeVar

from rich.console import Console
from rich.text import Text

from shoal.base.plans.parameter_splits import ExchangeRow, FlopsRow, SplitReport, SplitRow
from shoal.base.text.units import bytes_text, flops_text

WIDTH = 100
WIDEST_NAME, WIDEST_SHARD = 40, 30
"""Columns; longer names and shards are broken over lines."""

Line = tuple[str, str]
"""(text, style)"""


def print_splits(explained: SplitReport, stream: TextIO) -> None:
    """Write how a layout splits each parameter, and why, as a table; in colours on a terminal."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for text, style in split_lines(explained, min(WIDTH, max(80, console.width))):
        console.print(Text(text, style=style), soft_wrap=True)


def split_lines(explained: SplitReport, width: int = WIDTH) -> list[Line]:
    """Return the whole table as lines of at most `width` columns."""
    total = len(explained.rows)
    counted = f"{total} parameter{'s' if total != 1 else ''}"
    head = (
        f"{explained.model}: {counted} under {explained.layout}, "
        f"{explained.split} split, {total - explained.split} whole on every rank"
        f"{' of their stage' if any(row.stage for row in explained.rows) else ''}"
    )
    lines = [(text, "bold") for text in textwrap.wrap(head, width)]
    lines += [("", ""), *_table(fold_rows(explained.rows), width)]
    if explained.exchanges:
        passes = f"a forward and backward pass of {explained.samples} samples exchanges over tp:"
        lines += [("", ""), (passes, "bold")]
        lines += [(_exchange(one), "") for one in fold_rows(explained.exchanges)]
    if explained.flops:
        lines += [("", ""), *_flops(explained.flops)]
    if explained.notices:
        lines += [("", "")]
        lines += [(text, "yellow") for one in explained.notices for text in _wrap_item(one, width)]
    return lines


Row = TypeVar("Row", SplitRow, ExchangeRow)


def fold_rows(rows: Sequence[Row]) -> list[Row]:
    """Merge rows that differ only in a number within their names, keeping their order.

    >>> row = SplitRow("layers.0.w", (4, 4), "tp", "rows 0:2 of 4")
    >>> more = [replace(row, name=f"layers.{k}.w") for k in (1, 2, 5)]
    >>> [r.name for r in fold_rows([row, *more, replace(row, name="head.w")])]
    ['layers.0–2,5.w', 'head.w']
    """
    named: list[tuple[tuple[str, ...], Row]] = [(tuple(r.name.split(".")), r) for r in rows]
    deepest = max((len(parts) for parts, _ in named), default=0)
    for place in reversed(range(deepest)):
        named = _fold_rows_at(named, place)
    return [replace(row, name=".".join(parts)) for parts, row in named]


def _fold_rows_at(
    named: Iterable[tuple[tuple[str, ...], Row]], place: int
) -> list[tuple[tuple[str, ...], Row]]:
    """Merge rows whose names differ at one place, where each has a number."""
    groups: dict[object, list[tuple[tuple[str, ...], Row]]] = {}
    for parts, row in named:
        numbered = place < len(parts) and parts[place].isdecimal()
        here = () if numbered else parts[place : place + 1]
        alike = (parts[:place], here, parts[place + 1 :], len(parts), replace(row, name=""))
        groups.setdefault(alike, []).append((parts, row))
    merged: list[tuple[tuple[str, ...], Row]] = []
    for same in groups.values():
        first, its = same[0]
        folded = list(first)
        if len(same) > 1:
            folded[place] = _ranges(sorted(int(other[place]) for other, _ in same))
        merged.append((tuple(folded), its))
    return merged


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers, with runs of three and more shortened.

    >>> _ranges([0, 1, 2, 3, 5, 7, 8])
    '0–3,5,7,8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        words += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return ",".join(words)


def _table(rows: Sequence[SplitRow], width: int) -> list[Line]:
    """Return columns: name, stage (of a pipeline), axis, shard, and collective or reason."""
    staged = any(row.stage for row in rows)
    head = ["parameter", "stage", "axis", "first rank holds", "what travels · why"]
    cells = [head]
    for row in rows:
        stages = ", ".join(map(str, row.stage))
        said = " · ".join(text for text in (row.collective, row.reason) if text)
        cells.append([row.name, stages, row.axis, row.shard, said])
    if not staged:
        cells = [[line[0], *line[2:]] for line in cells]
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    widths[0] = min(widths[0], WIDEST_NAME)
    widths[-2] = min(widths[-2], WIDEST_SHARD)
    widths[-1] = max(20, width - sum(widths[:-1]) - 2 * (len(widths) - 1))
    notes = _notes([line[-1] for line in cells[1:]], widths[-1])
    for line in cells:
        line[-1] = notes.get(line[-1], line[-1])
    lines = _columns(cells, widths)
    for text, mark in notes.items():
        lines += [(line, "") for line in _wrap_item(f"{mark} {text}", width)]
    return lines


def _notes(texts: Sequence[str], room: int) -> dict[str, str]:
    """Return marks for long texts that stand in several lines; each is written once, below."""
    counted = Counter(texts)
    long = [text for text, times in counted.items() if times > 1 and len(text) > room]
    return {text: f"[{number}]" for number, text in enumerate(long, 1)}


def _columns(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> list[Line]:
    """Return cells in columns, the first line bold, long cells broken over lines."""
    lines = []
    for place, line in enumerate(cells):
        style = "bold" if place == 0 else ""
        columns = [
            textwrap.wrap(text, room, break_on_hyphens=False) or [""]
            for text, room in zip(line, widths, strict=True)
        ]
        for level in range(max(map(len, columns))):
            texts = [part[level] if level < len(part) else "" for part in columns]
            shown = [text.ljust(room) for text, room in zip(texts, widths, strict=True)]
            lines.append(("  ".join(shown).rstrip(), style))
    return lines


def _exchange(row: ExchangeRow) -> str:
    """Format one exchange: `blocks.0–3` stands for each of four modules."""
    each = f"{row.count} × {row.kind} of {bytes_text(row.payload_bytes)}"
    return f"  {row.name or 'the model':<{WIDEST_NAME - 2}}  {row.when:<8}  {each}"


def _flops(rows: Sequence[FlopsRow]) -> list[Line]:
    """Return the flops of each kind of module, and their sum."""
    total = sum(row.flops for row in rows)
    lines = [("a forward pass of one sample, products and attention, by module:", "bold")]
    for row in (*rows, FlopsRow("in all", sum(row.modules for row in rows), total)):
        size = flops_text(row.flops).removesuffix("/s")
        name = textwrap.shorten(row.kind, WIDEST_NAME - 2, placeholder="…")
        share = f"{row.flops / total:6.1%}"
        lines.append((f"  {name:<{WIDEST_NAME - 2}}  {row.modules:>5}  {size:>12}  {share}", ""))
    return lines


def _wrap_item(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
