"""Newest validation of a run's data owners: the mean over all, each owner, the worst first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import ENOUGH_TARGETS, find_larger_worst
from shoal.report.run_contents import RunContents

BITS = "bits_per_byte"
"""Loss of an owner of text, per byte of it."""
NEXT_OWNERS = 3
"""Owners after the worst one that a line in the terminal names."""


@dataclass(frozen=True)
class OwnerValidation:
    """Newest validation of all data owners.

    Attributes:
        event: the event of the validation: means over all targets.
        rows: (name, values) of each owner, the worst first.
        in_bytes: owners compare by bits per byte: a loss per token depends on the tokenizer.
    """

    event: Record
    rows: list[tuple[str, Record]]
    in_bytes: bool

    @property
    def larger_worst(self) -> str:
        """Return the worst owner of those with enough targets, if the worst of all has fewer."""
        rows = {name: row for name, row in self.rows if row.get("targets")}
        return find_larger_worst(next(iter(rows)), rows) if rows else ""

    def lines(self) -> list[str]:
        """Return the mean and the worst owner, and the next worst owners, as lines of text."""
        count = max(len(self.rows), int(self.event.get("owners") or 0))
        mean = describe_values(self.event, in_bytes=self.in_bytes)
        counting = [(name, row) for name, row in self.rows if row.get("targets")]
        found = [f"owners with held-out samples: {len(counting)} of {count}; mean {mean}"]
        if counting:
            name, row = counting[0]
            targets = f", of {row['targets']:.0f} targets" if is_number(row["targets"]) else ""
            worst = describe_values(row, in_bytes=self.in_bytes)
            line = f"worst owner {name}: {worst}{targets}"
            following = [
                f"{name} {describe_values(row, in_bytes=self.in_bytes)}"
                for name, row in counting[1 : 1 + NEXT_OWNERS]
            ]
            found.append(line + (f"; next: {'; '.join(following)}" if following else ""))
            if self.larger_worst:
                row = dict(counting)[self.larger_worst]
                values = describe_values(row, in_bytes=self.in_bytes)
                found.append(
                    f"worst owner with {ENOUGH_TARGETS} targets or more {self.larger_worst}: "
                    f"{values}, of {row['targets']:.0f} targets"
                )
        return found


def read_owner_validation(run: RunContents) -> OwnerValidation | None:
    """Return the newest validation of the data owners of a run; None without owners."""
    found = [event for event in run.curve_runs[0].named("validated") if event.get("worst")]
    by_owner: Any = found[-1].get("by_source") if found else None
    if not isinstance(by_owner, dict) or not by_owner:
        return None
    rows = [(str(name), row) for name, row in by_owner.items() if isinstance(row, dict)]
    counting = [row for _, row in rows if row.get("targets")]
    in_bytes = bool(counting) and all(BITS in row for row in counting)
    rows.sort(key=lambda one: _loss_rank(one[1], BITS if in_bytes else "loss"))
    return OwnerValidation(found[-1], rows, in_bytes)


def describe_values(values: Record, *, in_bytes: bool) -> str:
    """Return loss and accuracy as text.

    >>> describe_values({"loss": 0.98834, "accuracy": 8 / 11}, in_bytes=False)
    'loss 0.9883, accuracy 72.7%'
    """
    words = [f"loss {values['loss']:.4f}" if is_number(values.get("loss")) else "loss not finite"]
    if in_bytes and is_number(values.get(BITS)):
        words.insert(0, f"{values[BITS]:.4f} bits per byte")
    if is_number(values.get("accuracy")):
        words.append(f"accuracy {values['accuracy']:.1%}")
    return ", ".join(words)


def _loss_rank(row: Record, key: str) -> float:
    """Return a key that sorts by a loss: not finite ones first, rows without targets last."""
    if is_number(row.get(key)):
        return -float(row[key])
    return -math.inf if row.get("targets") else math.inf
