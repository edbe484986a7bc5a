"""Predicted and measured figures of a comparison's rows: step time, memory, bytes sent.

Memory is the allocation of torch on the fullest rank (states and the peak of a step beyond them);
bytes are one rank's in one step. The ratio is measured ÷ predicted, as in all commands.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from shoal.base.text.forecast_text import ratio_text
from shoal.base.text.units import bytes_text, seconds_text

Record = dict[str, Any]
Text = Callable[[float], str]


def predicted_and_measured(row: Record) -> dict[str, tuple[float, float]]:
    """Return a row's figures that are both predicted and measured: name → (predicted, measured).

    Figures that are unknown or 0 on either side are absent.

    >>> predicted_and_measured(
    ...     {
    ...         "predicted": {"step_s": 0.9},
    ...         "step_s": [1.0, 1.0],
    ...         "memory": [{"rest": None}],
    ...         "sent_bytes": {},
    ...     }
    ... )
    {'step': (0.9, 1.0)}
    """
    said = row.get("predicted") or {}
    if not row.get("step_s"):
        return {}
    ranks = [rank for rank in row["memory"] if rank.get("rest") is not None]
    pairs = {
        "step": (said.get("step_s"), statistics.median(row["step_s"])),
        "memory": (
            said.get("allocated_bytes"),
            max((sum(rank.values()) for rank in ranks), default=0),
        ),
        "sent": (said.get("sent_bytes"), sum(row["sent_bytes"].values())),
    }
    return {name: (one, other) for name, (one, other) in pairs.items() if one and other}


def forecast_error_lines(rows: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a table of at most 80 columns; [] if no row has a prediction."""
    known = [(row, found) for row in rows if (found := predicted_and_measured(row))]
    if not known:
        return []
    head = f"{'predicted (ratio)':<20}{'step time':>22}{'memory':>19}{'sent':>19}"
    lines = [(head, "bold")]
    for row, found in known:
        name = f"{row['layout']} {row['parts']}"
        cells = [
            _cell(found.get("step"), seconds_text, 22),
            _cell(found.get("memory"), bytes_text, 19),
            _cell(found.get("sent"), bytes_text, 19),
        ]
        lines.append((f"{name:<20}{''.join(cells)}".rstrip(), ""))
    return lines


def _cell(pair: tuple[float, float] | None, text: Text, width: int) -> str:
    if pair is None:
        return " " * width
    return f"{text(pair[0])} ({ratio_text(*pair)})".rjust(width)
