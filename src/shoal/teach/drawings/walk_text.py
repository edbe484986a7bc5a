"""Print a step-through: the text of each step, then the table of each rank's values.

`[22]` is complete, `12+` a sum over some ranks, `7` a rank's own number, `.` nothing; `<3` behind a
number marks one that has just arrived from rank 3. On a terminal colours show the same.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from shoal.teach.drawings.packed_words import facts_lines, pack_words
from shoal.teach.drawings.timeline_text import WIDTH, print_line
from shoal.teach.walks.walk import LOOKS, StepThrough, TableCell, select_steps

STYLES = {"own": "", "part": "yellow", "whole": "bold green", "none": "dim", "busy": "cyan"}
MARKS = {"own": "{}", "part": "{}+", "whole": "[{}]", "none": ".", "busy": "{}~"}


def print_walk(walk: StepThrough, stream: TextIO) -> None:
    """Write the whole step-through, in colours only on a terminal."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for line in walk_lines(walk):
        print_line(console, line, stream)


def walk_lines(walk: StepThrough, width: int = WIDTH) -> list[Text]:
    """Return the step-through as lines of at most `width` columns."""
    lines = [Text(walk.title, style="bold")]
    lines += [Text(line) for text in walk.story for line in textwrap.wrap(text, width)]
    marks = {name: MARKS[name].format(name[0] if name == "none" else "7") for name in LOOKS}
    present = {cell.look for step in walk.steps for row in step.cells for cell in row}
    says = {**LOOKS, **walk.looks}
    key = "   ".join(f"{marks[n]} {says[n]}" for n in LOOKS if n in present)
    from_rank = any(c.came_from is not None for s in walk.steps for row in s.cells for c in row)
    key += "   <3 just came from rank 3" if from_rank else ""
    lines += [Text(key, style="dim"), Text("")]
    if walk.start:
        lines += [Text("start", style="bold"), *_table(walk, walk.start, width), Text("")]
    for step in select_steps(walk):
        if isinstance(step, int):
            lines += [Text(f"… {step} more rounds of the same kind", style="dim"), Text("")]
            continue
        lines.append(Text(step.title, style="bold"))
        lines += [Text(line) for line in pack_words(step.happens, " · ", width)]
        lines += _table(walk, step.cells, width)
        lines += [Text(line, style="dim") for line in textwrap.wrap(step.note, width)]
        lines.append(Text(""))
    lines += [Text(line) for line in textwrap.wrap(f"checked: {walk.checked}", width)]
    facts = walk.facts if walk.timeline is None else {}
    return lines + [Text(line) for line in facts_lines(facts, width)]


def _table(walk: StepThrough, cells: Sequence[Sequence[TableCell]], width: int) -> list[Text]:
    margin = max(len(name) for name in walk.rows) + 2
    for gap, origins in ((2, True), (1, True), (1, False)):
        texts = [[_text(cell, origins) for cell in row] for row in cells]
        wide = [
            max(len(name), *(len(row[place]) for row in texts)) + gap
            for place, name in enumerate(walk.columns)
        ]
        if margin + sum(wide) <= width:
            break
    head = "".join(name.rjust(w) for name, w in zip(walk.columns, wide, strict=True))
    lines = [Text(" " * margin + head, style="dim")]
    for name, row, written in zip(walk.rows, cells, texts, strict=True):
        line = Text(name.ljust(margin))
        for cell, text, w in zip(row, written, wide, strict=True):
            line.append(" " * (w - len(text)))
            fresh = cell.came_from is not None
            line.append(text, style=f"{STYLES[cell.look]}{' reverse' if fresh else ''}".strip())
        lines.append(line)
    return lines


def _text(cell: TableCell, origins: bool) -> str:
    """Return the text of a cell.

    Args:
        origins: there is room for the rank that sent the value.
    """
    text = MARKS[cell.look].format(cell.text)
    return text if cell.came_from is None or not origins else f"{text}<{cell.came_from}"
