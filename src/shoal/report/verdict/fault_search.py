"""The fault for which a run suffers still: one that ended it, divergence, or many skipped steps.

    ended      what `shoal diagnose` finds, unless the run went on after it
    diverged   the last losses are not finite, or lie far above the first ones
    skipped    a large share of the newest steps changed no weights

A fault that the run got over, as a death with a restart, costs time (goodput), and is no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import number_text
from shoal.view.diagnose import RunFinding, diagnose

NOT_FATAL = ("slow_rank", "loader", "sample_left_out", "notice", "spike", "step_skipped", "damaged")
"""Findings that end no run."""
GOES_ON = ("compute_started", "checkpoint_saved", "validated")
WENT_ON = (*GOES_ON, "run_finished")
"""Events that show that a run went on after a fault."""
SKIPPED_SHARE = 0.05
LOSSES = 20
"""Losses at the beginning and at the end that are compared."""
TIMES_SPREAD = 4.0


@dataclass(frozen=True)
class RunFault:
    """A fault, and the share of the newest steps that it costs; None if it ended the run."""

    cause: str
    evidence: tuple[str, ...]
    command: str
    share: float | None = None


def find_fault(folder: Path, events: Sequence[Record], rows: Sequence[Record]) -> RunFault | None:
    """Return the fault that a run did not get over; None without one.

    Args:
        folder: the run's.
        events: all events, oldest first.
        rows: newest lines of metrics.jsonl.
    """
    found = diagnose(folder)
    ended = [one for one in found if _has_ended(one, events)]
    if ended:
        # Of several the first: the others follow from it, as the death of the last rank does.
        first = ended[0]
        why = (first.why,) if first.why else ()
        return RunFault(first.what, why, first.command)
    return _find_skips(found, rows) or _find_divergence(rows)


def _has_ended(one: RunFinding, events: Sequence[Record]) -> bool:
    if one.advice or one.kind in NOT_FATAL:
        return False
    places = [at for at, event in enumerate(events) if event.get("event") == one.kind]
    if not places:
        return not one.over
    after = events[places[-1] + 1 :]
    if any(event.get("how") == "completed" for event in after):
        return False  # a rank that was silent, and went on
    names = {event.get("event") for event in after}
    if one.kind == "hang":
        return not names.intersection(GOES_ON)
    return not one.over or not names.intersection(WENT_ON)


def _find_skips(found: Sequence[RunFinding], rows: Sequence[Record]) -> RunFault | None:
    skipped = sum(row.get("skipped") is True for row in rows)
    if not rows or skipped < max(3, SKIPPED_SHARE * len(rows)):
        return None
    why = [one for one in found if one.kind == "step_skipped"]
    evidence = [f"{skipped} of the last {len(rows)} steps changed no weights."]
    if why:
        evidence += [f"{why[-1].what}.", f"{why[-1].why}."]
    return RunFault(
        "skipped steps",
        tuple(evidence),
        "the samples that the events name; a smaller optimizer.lr",
        skipped / len(rows),
    )


def _find_divergence(rows: Sequence[Record]) -> RunFault | None:
    losses = [row.get("loss") for row in rows if "loss" in row]
    if len(losses) < 2 * LOSSES:
        return None
    last = losses[-LOSSES:]
    known = [one for one in losses if is_number(one)]
    command = "a smaller optimizer.lr, from a checkpoint before it rose"
    if sum(not is_number(one) for one in last) > LOSSES / 2:
        return RunFault("the loss is no longer finite", (), command)
    ends = [one for one in last if is_number(one)]
    blocks = [known[at : at + LOSSES] for at in range(0, len(known) - LOSSES + 1, LOSSES)]
    best = min(blocks, key=statistics.median)
    low, high = statistics.median(best), statistics.median(ends)
    spread = statistics.median(abs(one - low) for one in best)
    if high <= low + TIMES_SPREAD * max(spread, 0.02 * abs(low)) or high < low + math.log(2) / 2:
        return None
    first = statistics.median(known[:LOSSES])
    if high < first:
        return None
    text = f"the loss diverged: {number_text(low, 4)} before, {number_text(high, 4)} in the last "
    return RunFault(f"{text}{LOSSES} steps", (), command)
