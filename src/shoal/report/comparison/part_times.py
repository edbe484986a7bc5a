"""Seconds of a step by part for each run of a comparison: why one run is faster than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.text.units import seconds_text
from shoal.report.comparison.compared_runs import ComparisonRun
from shoal.report.comparison.run_comparison import Comparison
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.sections.rank_heat import LOOKS, NAMES, part_name
from shoal.report.svg_charts import colour_class, stacked_bar
from shoal.report.verdict.step_seconds import WAITING, read_step_seconds

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

ORDER = (1, 2, 6, 3, 4, 5, 0, 7)
"""Parts in the order of a bar: waiting comes last."""
EVEN_SHARE = 0.05
"""Share of a step by which a rank's part must exceed the mean to be named."""


@dataclass(frozen=True)
class StepParts:
    """Mean seconds of a run's newest steps.

    Attributes:
        steps: number of these steps.
        mean_s: [parts] mean over ranks, parts as in `PARTS`.
        slowest_rank: the rank that works longest between its waits.
        slowest_s: [parts] of that rank.
        slowest_part: its part with the largest excess over the mean of all ranks.
    """

    steps: int
    mean_s: Array
    slowest_rank: int
    slowest_s: Array
    slowest_part: int


def read_step_parts(folder: Path, last_step: int | None = None) -> StepParts | None:
    """Return the seconds of a run's newest steps by part; None if no rank recorded any.

    Args:
        folder: the run's.
        last_step: later steps are left out, as those that a resume makes again.
    """
    found = read_step_seconds(folder, [])
    if found is not None and last_step is not None:
        found = found.select_steps(found.steps <= last_step)
    if found is None or not len(found.steps):
        return None
    by_rank = found.seconds.mean(axis=0, dtype="float64")  # [ranks, parts]
    mean_s = by_rank.mean(axis=0)
    at = int(by_rank[:, :WAITING].sum(axis=1).argmax())
    excess = by_rank[at, :WAITING] - mean_s[:WAITING]
    return StepParts(len(found.steps), mean_s, found.ranks[at], by_rank[at], int(excess.argmax()))


def step_parts_section(found: Comparison) -> Markup:
    """Return a bar of the seconds of a step for each run, and its slowest rank."""
    parts = [read_step_parts(run.contents.folder, _last_step(run)) for run in found.runs]
    known = [one for one in parts if one is not None]
    if not known:
        return Markup("")
    longest_s = max(float(one.mean_s.sum()) for one in known)
    used = [at for at in ORDER if max(float(one.mean_s[at]) for one in known) > longest_s / 1000]
    rows: list[Sequence[Child]] = []
    for number, (run, one) in enumerate(zip(found.runs, parts, strict=True)):
        name: Child = [tag("i", class_=f"key {colour_class(number)}"), " ", run.label]
        rows.append([name, *(["–"] * 3 if one is None else _cells(one, used, longest_s))])
    legend = [
        tag("span", tag("i", class_=f"key {LOOKS[part]}"), part_name(part, used)) for part in used
    ]
    head = ["run", "seconds of a step by part, mean over ranks", "step, mean", "slowest rank"]
    least, most = (pick(one.steps for one in known) for pick in (min, max))
    steps = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    note = f"Means of the newest {steps} steps of a run; “–”: no times by rank were recorded."
    return tag(
        "section",
        [
            tag("h2", "Where the time of a step goes"),
            tag("div", legend, class_="legend"),
            table(head, rows, numeric=" bne"),
            tag(
                "p",
                note,
                class_="note",
            ),
        ],
        id="parts",
    )


def _last_step(run: ComparisonRun) -> int | None:
    return int(run.series.steps[-1]) if len(run.series.steps) else None


def _cells(one: StepParts, used: Sequence[int], longest_s: float) -> list[Child]:
    words = ", ".join(
        f"{part_name(part, used)} {seconds_text(float(one.mean_s[part]))}" for part in used
    )
    bar = stacked_bar([(LOOKS[part], float(one.mean_s[part])) for part in used], longest_s, words)
    own, mean = (float(s[one.slowest_part]) for s in (one.slowest_s, one.mean_s))
    if own - mean < EVEN_SHARE * float(one.mean_s.sum()):
        slowest = "none: all ranks take about the same time"
    else:
        slowest = (
            f"rank {one.slowest_rank:,}: {NAMES[one.slowest_part]} {seconds_text(own)} "
            f"(mean of ranks {seconds_text(mean)})"
        )
    return [bar, seconds_text(float(one.mean_s.sum())), slowest]
