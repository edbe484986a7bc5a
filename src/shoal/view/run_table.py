"""Rows of the runs in a folder: what state each is in, how far it is, when it last gave a sign.

The state is that of `diagnosis/folder_state.py`, as `shoal diagnose` has it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.base.layouts.layout import Layout
from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import number_text, strip_control_characters
from shoal.base.text.units import rate_text, seconds_text
from shoal.view.diagnosis.folder_evidence import (
    SILENT_S,
    FolderEvidence,
    read_evidence,
    read_first_start_s,
    read_held_locks,
    read_last_validation,
)
from shoal.view.diagnosis.folder_state import WRONG, decide_state
from shoal.view.diagnosis.run_folders import find_run_folders
from shoal.view.progress import count_unit, local_time_text, short_unit, step_amount

__all__ = (
    *("RunRow", "hidden_columns_line", "list_runs", "read_held_locks", "read_row"),
    *("table_lines", "weigh_losses", "worst_line"),
)

SHORT_NAME = 20
"""Columns that a name keeps before the table loses its last column."""


@dataclass(frozen=True)
class RunRow:
    """One run of a folder.

    Args:
        name: its path below the folder that was listed.
        path: its folder.
        state: as in the table of `diagnosis/folder_state.py`.
        how: how it ended, in words; "" if it did not.
        step, steps: the last step, and all of them; 0: unknown.
        loss: the newest one; of islands the mean, weighted by the tokens or samples of their steps.
        validation: the newest one of any session.
        rate: tokens or samples a second over the newest steps; of islands together.
        unit: tokens, samples, or targets of own loops.
        layout: its name.
        started_s: when its first session began, seconds since 1970; 0.0: unknown.
        last_sign_s: seconds since 1970; 0.0: unknown.
        alive: a process may still work in the folder.
    """

    name: str
    path: str
    state: str
    how: str
    step: int
    steps: int
    loss: float | None
    validation: float | None
    rate: float | None
    unit: str
    layout: str
    started_s: float
    last_sign_s: float
    alive: bool = False


def list_runs(folder: Path, now_s: float | None = None) -> list[RunRow]:
    """Return the runs in a folder and below it, the one with the newest sign of life first.

    Args:
        folder: a run folder, or one that holds some, at most three folders deep.
        now_s: the time, seconds since 1970; None: now.
    """
    now_s, held = now_s or time.time(), read_held_locks()
    rows = [read_row(path, folder, now_s, held) for path in find_run_folders(folder)]
    return sorted(rows, key=lambda row: (-row.last_sign_s, row.name))


def read_row(path: Path, root: Path, now_s: float, held: set[int]) -> RunRow:
    """Return the row of one run folder, whatever is missing or damaged in it."""
    seen = read_evidence(path, now_s, held)
    state = decide_state(seen)
    # The islands of a run make its steps.
    parts = seen.islands if seen.islands and not seen.steps else (seen,)
    # A validation is of the merged weights, which all islands hold after a round.
    validations = (read_last_validation(one.folder) for one in parts)
    below = path.relative_to(root) if path != root else Path(path.absolute().name)
    return RunRow(
        strip_control_characters(str(below)),
        str(path),
        state.word,
        state.how,
        state.step,
        state.steps,
        _mean_loss(parts),
        next(filter(is_number, validations), None),
        _rate_of_all(parts),
        count_unit(parts[0].plan),
        _layout_name(seen.plan),
        read_first_start_s(path) or seen.started_s or seen.ranks_s,
        state.last_sign_s,
        state.alive,
    )


def _mean_loss(parts: Sequence[FolderEvidence]) -> float | None:
    """Return the mean of the islands' newest losses, without islands that stopped long before."""
    newest_s = max(one.rows_s for one in parts)
    found = []
    for one in parts:
        rows = [row for row in one.steps if is_number(row.get("loss"))]
        if rows and one.rows_s >= newest_s - SILENT_S:
            found.append((rows[-1]["loss"], step_amount(rows[-1], count_unit(one.plan))))
    return weigh_losses(found)


def weigh_losses(losses: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the mean of losses, each weighted by the tokens or samples of its step.

    Without the counts of all of them, each weighs as much as any other; None of no losses.

    >>> weigh_losses([(4.0, 300), (8.0, 100)]), weigh_losses([(4.0, 300), (8.0, None)])
    (5.0, 6.0)
    """
    if not losses:
        return None
    weights = [weight for _, weight in losses if weight]
    if len(weights) < len(losses):
        weights = [1.0] * len(losses)
    pairs = zip(losses, weights, strict=True)
    return sum(loss * weight for (loss, _), weight in pairs) / sum(weights)


def _rate_of_all(parts: Sequence[FolderEvidence]) -> float | None:
    rates = [rate for one in parts if (rate := _rate(one.steps, one.plan)) is not None]
    return sum(rates) if rates else None


def _rate(steps: list[Record], plan: Record) -> float | None:
    unit = count_unit(plan)
    known = [(step_amount(s, unit), s.get("step_s")) for s in steps]
    pairs = [(amount, s) for amount, s in known if amount and is_number(s) and s]
    seconds = sum(float(s or 0) for _, s in pairs)
    return sum(amount for amount, _ in pairs) / seconds if seconds > 0 else None


def _layout_name(plan: Record) -> str:
    try:
        return Layout(**plan["layout"]).strategy
    except (KeyError, TypeError, ValueError):
        return ""


HEAD = ("run", "state", "step", "loss", "valid.", "rate", "layout", "sign", "started")
NAMED_RUNS = 3
"""Further runs that the last line names."""


def table_lines(rows: Iterable[RunRow], width: int | None, now_s: float) -> list[str]:
    """Return the rows as a table; narrow terminals lose the last columns, and names their middle.

    Args:
        rows: in the order of the table.
        width: columns of the terminal; None: a pipe, which gets all columns and whole names.
        now_s: the time, for "started" and "last sign".
    """
    cells = [HEAD, *(_cells(row, now_s) for row in rows)]
    widths = _fit_columns(cells, width)
    lines = []
    for row in cells:
        texts = [_shorten_middle(row[0], widths[0]).ljust(widths[0]), row[1].ljust(widths[1])]
        pairs = zip(row[2 : len(widths)], widths[2:], strict=True)
        lines.append("  ".join([*texts, *(text.rjust(w) for text, w in pairs)]).rstrip())
    return lines


def _fit_columns(cells: list[tuple[str, ...]], width: int | None) -> list[int]:
    """Return the widths of the columns that fit; at least the first four."""
    widths = [max(len(row[k]) for row in cells) for k in range(len(HEAD))]
    if width is None:
        return widths
    kept = len(HEAD)
    while kept > 4 and min(widths[0], SHORT_NAME) + sum(widths[1:kept]) + 2 * (kept - 1) > width:
        kept -= 1
    widths[0] = min(widths[0], max(SHORT_NAME, width - sum(widths[1:kept]) - 2 * (kept - 1)))
    return widths[:kept]


def hidden_columns_line(rows: Iterable[RunRow], width: int | None, now_s: float) -> str:
    """Return the line that names the columns which the terminal has no room for; "" for none."""
    kept = len(_fit_columns([HEAD, *(_cells(row, now_s) for row in rows)], width))
    if kept == len(HEAD):
        return ""
    return f"(too narrow for: {', '.join(HEAD[kept:])})"


def worst_line(rows: Iterable[RunRow]) -> str:
    """Return the next command for the run in the worst state; "" if none needs one."""
    wrong = [row for row in rows if row.state in WRONG]
    wrong.sort(key=lambda row: WRONG.index(row.state))
    if not wrong:
        return ""
    first, *others = wrong
    path = strip_control_characters(shlex.quote(first.path))
    names = ", ".join(f"{row.name} {row.state}" for row in others[:NAMED_RUNS])
    more = f" and {len(others) - NAMED_RUNS} more" if len(others) > NAMED_RUNS else ""
    also = f"; also {names}{more}" if others else ""
    return f"next: shoal diagnose {path}  ({first.state}{also})"


def _cells(row: RunRow, now_s: float) -> tuple[str, ...]:
    # More steps than planned: a resume with a smaller train.steps.
    of = f"{row.step}/{row.steps}" if row.steps else str(row.step)
    rate = f"{rate_text(row.rate)} {short_unit(row.unit)}/s" if row.rate else "–"
    started, sign = row.started_s, row.last_sign_s
    return (
        row.name,
        row.state,
        of,
        number_text(row.loss, 4),
        number_text(row.validation, 4),
        rate,
        row.layout or "–",
        _age_text(now_s - sign) if sign else "–",
        (local_time_text(started, "%m-%d %H:%M") or "–") if started else "–",
    )


def _age_text(seconds: float) -> str:
    return "now" if seconds < 1 else f"{seconds_text(seconds)} ago"


def _shorten_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = width // 2
    return f"{text[: width - tail - 1]}…{text[-tail:]}"
