"""A replay as lines for a terminal, and as one JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.units import count_noun, seconds_text
from shoal.replay.first_difference import NumberDifference, find_number_difference
from shoal.replay.step_marks import (
    BEFORE,
    FORWARD,
    GRADIENTS,
    Marks,
    StepMarks,
    StepRecord,
    TensorMark,
)

BOUNDS = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
"""Largest relative difference of a loss that is rounding, by format; as of `shoal compare`."""
MOST_ROWS, MOST_TENSORS = 6, 40
DISTANT_STEPS = 20
"""Steps without a checkpoint from which the price of a replay is told."""


@dataclass
class Replay:
    """One replay that ended.

    Attributes:
        run: the run's folder.
        start: step of the checkpoint from which it began; 0: from the run's first step.
        record: what it computed.
        own_rows: what the run wrote of these steps.
        is_same_layout: the run's layout, format and micro-batch were repeated.
        own_compute: format of the run's products.
    """

    run: Path
    start: int
    record: StepRecord
    own_rows: dict[int, Record]
    is_same_layout: bool
    own_compute: str

    @property
    def bound(self) -> float:
        """Return the largest relative difference that counts as equal; 0: none does."""
        if self.is_same_layout:
            return 0.0
        formats = self.own_compute, self.record.compute
        return max(BOUNDS.get(one, BOUNDS["bf16"]) for one in formats)

    @property
    def compared_steps(self) -> int:
        """Return the number of steps that both the run and the replay recorded."""
        return len(self.own_rows.keys() & self.record.rows.keys())

    def difference(self) -> NumberDifference | None:
        """Return the first number that is not the run's; None: all are."""
        return find_number_difference(self.own_rows, self.record.rows, bound=self.bound)

    def repeats_run(self) -> bool:
        """Return whether every recorded number is the run's."""
        return self.difference() is None


def opening_lines(
    run: Path, steps: tuple[int, int], shown: str, rows: Mapping[int, Record]
) -> list[str]:
    """Return the lines before a replay: the steps, the start, the layout, and a long one's price.

    Args:
        steps: the checkpoint's step (0: none), and the last step.
        shown: the layout in words.
        rows: the run's rows of these steps.
    """
    began, step = steps
    start = f"from its checkpoint of step {began}" if began else "from its first step"
    count = count_noun(step - began, "step")
    lines = [f"shoal {__version__}: replaying step {step} of {run}, {start}: {count}, {shown}"]
    times_s = sorted(float(row["step_s"]) for row in rows.values() if is_number(row.get("step_s")))
    if step - began > DISTANT_STEPS and times_s:
        whole_s = times_s[len(times_s) // 2] * (step - began)
        lines.append(
            f"no checkpoint lies nearer; these steps took the run about {seconds_text(whole_s)}; "
            f"checkpoint.every and checkpoint.keep of a run decide what is kept"
        )
    return lines


def replay_lines(done: Replay, step: int, *, with_statistics: bool = False) -> list[str]:
    """Return what a replay found: its last steps, the verdict, and the step's norms if asked."""
    lines = _table(done)
    lines.append(_verdict(done))
    if with_statistics and step in done.record.steps:
        lines += ["", *statistics_lines(done.record.steps[step])]
    lines.append(f"next: shoal data look {done.run} --step {step}")
    return lines


def _table(done: Replay) -> list[str]:
    newest = list(done.record.rows.items())[-MOST_ROWS:]
    lines = [f"{'step':>8}  {'loss':>12}  {'grad norm':>10}  {'lr':>10}  against the run"]
    for number, row in newest:
        values = [_number(row.get(key)) for key in ("loss", "grad_norm", "lr")]
        lines.append(
            f"{number:>8}  {values[0]:>12}  {values[1]:>10}  {values[2]:>10}  "
            f"{_against(done, number)}"
        )
    return lines


def _number(value: Any) -> str:
    return f"{value:.6g}" if is_number(value) else "–"


def _against(done: Replay, step: int) -> str:
    if step not in done.own_rows:
        return "not in the run's metrics.jsonl"
    one = {step: done.own_rows[step]}, {step: done.record.rows[step]}
    found = find_number_difference(*one)
    if found is None:
        return "same bits"
    return f"{found.key} {difference_text(found)}"


def difference_text(found: NumberDifference) -> str:
    """Return how far two numbers are apart.

    >>> difference_text(NumberDifference(3, "loss", (2.0, 2.5)))
    '2 → 2.5 (20 % apart)'
    >>> difference_text(NumberDifference(3, "loss", (2.0, 2.0000001)))
    'apart by 5e-08'
    """
    first, second = found.values
    if not (is_number(first) and is_number(second)):
        return f"{first} → {second}"
    if found.relative < 1e-3:
        return f"apart by {found.relative:.1g}"
    return f"{first:.6g} → {second:.6g} ({100 * found.relative:.2g} % apart)"


def _verdict(done: Replay) -> str:
    found, count = done.difference(), done.compared_steps
    if not count:
        return f"nothing to compare: {done.run}/metrics.jsonl has none of these steps"
    steps = count_noun(count, "step")
    if found is None and done.is_same_layout:
        return f"repeated: {steps} with the run's bits in loss, gradient norm, rate and samples"
    if found is None:
        return (
            f"repeated: {steps} equal to the run's but for rounding (other layout or format; bound "
            f"{done.bound:.0e})"
        )
    why = (
        "; try: the machine, torch and source of the run"
        if done.is_same_layout
        else f", more than rounding ({done.bound:.0e})"
    )
    return f"different from step {found.step}: {found.key} {difference_text(found)}{why}"


def statistics_lines(marks: StepMarks) -> list[str]:
    """Return two tables of a step: norms of parameters and gradients, and rms of outputs."""
    before, gradients = marks.marks.get(BEFORE, {}), marks.marks.get(GRADIENTS, {})
    rows = [
        f"{mark.norm:>12.6g}  {_norm(gradients, name):>12}  {_share(mark, gradients, name):>9}  "
        f"{name} [{_shape(mark)}]"
        for name, mark in before.items()
    ]
    head = f"{'weight norm':>12}  {'gradient':>12}  {'g ÷ w':>9}  tensor"
    lines = [head, *_first_rows(rows)]
    outputs = [
        f"{_rms(mark):>12.6g}  {name} [{_shape(mark)}]"
        for name, mark in marks.marks.get(FORWARD, {}).items()
    ]
    if outputs:
        lines += [f"{'output rms':>12}  part of the model", *_first_rows(outputs)]
    return lines


def _first_rows(rows: list[str]) -> list[str]:
    if len(rows) <= MOST_TENSORS:
        return rows
    return [
        *rows[:MOST_TENSORS],
        f"… {len(rows) - MOST_TENSORS} more; --record FILE has all of them",
    ]


def _shape(mark: TensorMark) -> str:
    return "×".join(map(str, mark.shape)) or "1"


def _norm(marks: Marks, name: str) -> str:
    return f"{marks[name].norm:.6g}" if name in marks else "–"


def _share(weight: TensorMark, gradients: Marks, name: str) -> str:
    if name not in gradients or not weight.norm:
        return "–"
    return f"{gradients[name].norm / weight.norm:.2g}"


def _rms(mark: TensorMark) -> float:
    return mark.norm / math.sqrt(max(1, mark.count))


def replay_record(done: Replay) -> dict[str, Any]:
    """Return a replay as one JSON document."""
    found = done.difference()
    return {
        "run": str(done.run),
        "from_step": done.start,
        "layout": done.record.layout,
        "processes": done.record.processes,
        "compute": done.record.compute,
        "same_layout": done.is_same_layout,
        "compared_steps": done.compared_steps,
        "repeats": found is None,
        "difference": asdict(found) if found else None,
        "rows": list(done.record.rows.values()),
        "tensors": {step: asdict(one)["marks"] for step, one in done.record.steps.items()},
    }
