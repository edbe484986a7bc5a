"""A comparison of layouts as text: one table, a bar chart of speed, and notes on the figures.

All of it comes from `compare.json`. A row that could not run shows its reason in place of its
figures; an unknown figure is blank. In narrow terminals states and bytes are sums, in wide ones
they are split by kind.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from shoal.base.text.terminal_encoding import READABLE
from shoal.base.text.units import count_text
from shoal.view.forecast_errors import forecast_error_lines

Record = dict[str, Any]
Line = tuple[str, str]
"""(text, style)"""

WIDE = 110
MUCH_SPREAD, MUCH_BUSY = 0.2, 0.15
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
BLOCKS = " ▏▎▍▌▋▊▉█"
KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Column:
    """One column: two lines of head, and the text of a row's cell (blank if unknown)."""

    over: str
    head: str
    cell: Callable[[Record], str]


def print_comparison(record: Record, stream: TextIO, kept: Sequence[str] = ()) -> None:
    """Write a comparison to `stream` as a table, bars and notes; in colours on a terminal.

    Args:
        record: as in compare.json.
        kept: files that hold the comparison, named in the last line.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    encoding = stream.encoding or "utf-8"
    for text, style in comparison_lines(record, console.width):
        shown = text.replace("█", "#") if not _can_encode(encoding, BLOCKS) else text
        shown = shown.encode(encoding, READABLE).decode(encoding)
        console.print(Text(shown, style=style), soft_wrap=True)
    if kept:
        console.print(Text(f"kept: {', '.join(kept)}"), soft_wrap=True)


def comparison_lines(record: Record, width: int) -> list[Line]:
    """Return the whole comparison as lines of at most `width` columns (80 and more)."""
    lines = [(line, "") for line in _wrap_text(_subject(record), width)]
    lines += [("", ""), *table_lines(record, width)]
    if any(row["per_s"] for row in record["rows"]):
        lines += [("", ""), (f"{record['unit']}/s", "bold"), *bar_lines(record["rows"], width)]
    if foreseen := forecast_error_lines(record["rows"]):
        lines += [("", ""), *foreseen]
    lines.append(("", ""))
    for note in note_lines(record):
        lines += [(line, "") for line in _wrap_text(note, width)]
    return lines


def _subject(record: Record) -> str:
    machine = record["machine"]
    formats = sorted({row["precision"] for row in record["rows"] if row["precision"]})
    parameters = record["parameters"]
    words = [
        record["model"],
        f"{count_text(parameters)} parameters" if parameters else "",
        ", ".join(formats),
        f"{record['batch']} samples per step in micro-batches of {record['micro_batch']}",
        f"median of {record['steps']} steps",
    ]
    where = f"{machine['cores']} core{'s' if machine['cores'] > 1 else ''}"
    if machine.get("device", "cpu") != "cpu":
        where = f"{machine['gpus']} GPU{'s' if machine['gpus'] > 1 else ''}"
    torch = f", torch {machine['torch']}" if "torch" in machine else ""
    return f"{'; '.join(word for word in words if word)}; {where}{torch}"


def table_lines(record: Record, width: int) -> list[Line]:
    """Return the table: two lines of head, one line per row; a reason may take more lines."""
    rows = record["rows"]
    columns = _columns(record, wide=width >= WIDE)
    cells = [[column.cell(row) for column in columns] for row in rows]
    widths = [
        max(len(column.over), len(column.head), *(len(line[place]) for line in cells), 0)
        for place, column in enumerate(columns)
    ]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1
    lines = [
        (_join_cells([column.over for column in columns], widths, gap), "bold"),
        (_join_cells([column.head for column in columns], widths, gap), "bold"),
    ]
    for row, line in zip(rows, cells, strict=True):
        if not row["reason"]:
            lines.append((_join_cells(line, widths, gap), "red" if row["exceeds_noise"] else ""))
            continue
        start = _join_cells(line[:2], widths[:2], gap) + " " * gap  # parts are never blank
        lines += [(text, "yellow") for text in _wrap_text(start + row["reason"], width, len(start))]
    return lines


def _join_cells(cells: Sequence[str], widths: Sequence[int], gap: int) -> str:
    """Join cells into a line: names to the left, figures to the right."""
    padded = [
        cell.ljust(width) if place == 0 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return (" " * gap).join(padded).rstrip()


def _columns(record: Record, *, wide: bool) -> list[Column]:
    rows = [row for row in record["rows"] if row["per_s"]]
    tops = [fullest_rank_memory(row) for row in rows]
    unit, size = _unit(max((sum(top.values()) for top in tops), default=0))
    sent_unit, sent_size = _unit(max((sum(row["sent_bytes"].values()) for row in rows), default=0))

    def held(*kinds: str) -> Callable[[Record], str]:
        return lambda row: _memory_text(fullest_rank_memory(row), kinds, size)

    def sent(*kinds: str) -> Callable[[Record], str]:
        return lambda row: _short_figure(
            sum(row["sent_bytes"].get(k, 0) for k in kinds) / sent_size
        )

    kinds = list(dict.fromkeys(kind for row in rows for kind in row["sent_bytes"]))
    columns = [
        Column("", "layout", lambda row: row["layout"]),
        Column("", "processes", parts_text),
        Column(
            "", f"{record['unit']}/s", lambda row: f"{row['per_s']:,.0f}{_oversubscribed_mark(row)}"
        ),
        Column("", "speedup", lambda row: _format_figure(row["speedup"], "{:.2f}×")),
        Column("effi-", "ciency", lambda row: _format_figure(row["efficiency"], "{:.0%}")),
    ]
    if wide:
        columns += [Column(kind, unit, held(kind)) for kind in KINDS]
        columns += [Column("rest", unit, held("rest"))]
        columns += [
            Column(kind.replace("_", "-"), f"{sent_unit}/step", sent(kind)) for kind in kinds
        ]
    else:
        columns += [Column("states", unit, held(*KINDS)), Column("rest", unit, held("rest"))]
        columns += [Column("sent", f"{sent_unit}/step", sent(*kinds))]
    columns.append(Column("differs", "by", _difference_text))
    names = columns[:2]
    return names + [Column(c.over, c.head, _blank_if_unknown(c.cell)) for c in columns[2:]]


def _blank_if_unknown(cell: Callable[[Record], str]) -> Callable[[Record], str]:
    return lambda row: cell(row) if row["per_s"] else ""


def parts_text(row: Record) -> str:
    """Return the number of processes of a row, or of the threads of one process (`dp`)."""
    return f"{row['parts']} threads" if row["layout"] == "dp" else str(row["parts"])


def _difference_text(row: Record) -> str:
    if row["layout"] == "single":
        return ""
    return _format_figure(row["difference"], "{:.0e}") + ("!" if row["exceeds_noise"] else "")


def _oversubscribed_mark(row: Record) -> str:
    return "*" if row["oversubscribed"] else ""


def _memory_text(rank: dict[str, int], kinds: Sequence[str], size: int) -> str:
    known = [rank[kind] for kind in kinds if kind in rank]
    return _short_figure(sum(known) / size) if known else ""


def _format_figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _short_figure(value: float) -> str:
    """Format a figure with about three digits: `0`, `0.42`, `7.3`, `118`."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def fullest_rank_memory(row: Record) -> dict[str, int]:
    """Return the memory of the rank that holds most; unknown kinds (`rest`) are absent."""
    ranks = [{kind: n for kind, n in rank.items() if n is not None} for rank in row["memory"]]
    return max(ranks, key=lambda rank: sum(rank.values()))


def _unit(largest_bytes: float) -> tuple[str, int]:
    """Return the unit in which the largest figure of a column has a digit before the point."""
    return next((unit for unit in UNITS if largest_bytes >= unit[1]), UNITS[-1])


def bar_lines(rows: list[Record], width: int) -> list[Line]:
    """Return one bar per measured row, as long as it is fast; the longest fills the width."""
    measured = [row for row in rows if row["per_s"]]
    labels = [f"{row['layout']:<8} {parts_text(row):>9}" for row in measured]
    values = [f"{row['per_s']:,.0f}{_oversubscribed_mark(row)}" for row in measured]
    room = width - max(map(len, labels)) - max(map(len, values)) - 4
    longest = max(row["per_s"] for row in measured)
    return [
        (f"{label}  {_bar(row['per_s'] / longest, room)} {value}", "cyan")
        for row, label, value in zip(measured, labels, values, strict=True)
    ]


def _bar(share: float, room: int) -> str:
    """Return a bar in eighths of a column.

    >>> _bar(0.5, 5), _bar(1.0, 2)
    ('██▌', '██')
    """
    eighths = max(1, round(share * room * 8))
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()


def note_lines(record: Record) -> list[str]:
    """Return sentences on what the figures mean and what they do not show."""
    rows, machine = record["rows"], record["machine"]
    threads, cores = machine.get("threads"), machine["cores"]
    said = []
    if machine.get("device") == "cpu":
        aside = "; one process with all cores may be as fast" if threads < cores else ""
        said.append(
            f"Every process computes with {threads} thread{'s' if threads > 1 else ''}, single "
            f"too{aside}. States and rest: the fullest rank, without torch itself."
        )
    if any(row["oversubscribed"] for row in rows):
        said.append(
            f"* more processes or threads than the {cores} core{'s' if cores > 1 else ''} here: "
            f"these times prove nothing about speed; memory, bytes and differences hold."
        )
    else:
        said.append("Bytes went between processes of one machine, not over a network.")
    if disturbed := _other_load_note(rows, machine):
        said.append(disturbed)
    if any(row["exceeds_noise"] for row in rows):
        said.append("! differs from one process by more than rounding: shoal prove finds where.")
    return said


def _other_load_note(rows: list[Record], machine: Record) -> str:
    """Return a sentence if other work on the machine slowed the rows; else ""."""
    spread = max((row["spread"] for row in rows if row["spread"]), default=0.0)
    busy = machine.get("busy", 0.0)
    signs = []
    if busy > MUCH_BUSY:
        signs.append(f"other work took {busy:.0%} of its cores just before")
    if spread > MUCH_SPREAD:
        signs.append(f"the middle half of one row's step times lies {spread:.0%} apart")
    return f"This machine was not quiet, speeds are rough: {'; '.join(signs)}." if signs else ""


def _wrap_text(text: str, width: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=True,
    ) or [""]  # fmt: skip


def _can_encode(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
