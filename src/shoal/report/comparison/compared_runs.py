"""Runs of a comparison, read one after another: of each only what its page needs stays in memory.

Twenty runs of 100,000 steps are 800 MB of metrics. The columns of a run become points of charts as
soon as they are read; of each step only loss, tokens and seconds so far stay.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ConfigError, ShoalError
from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.base.runlog.damaged_lines import is_number
from shoal.base.text.event_sentences import DAMAGED
from shoal.report.comparison.key_differences import RunKeys, read_run_keys
from shoal.report.comparison.loss_differences import LossSeries
from shoal.report.markup import clean_text
from shoal.report.metric_series import (
    NUMBERS,
    SampledSeries,
    StepMetrics,
    read_step_metrics,
    sample_knots,
    sample_series,
)
from shoal.report.order_statistics import median
from shoal.report.run_contents import (
    RunContents,
    check_run_folder,
    list_islands,
    read_bounded_object,
    read_events,
)
from shoal.report.verdict.run_verdict import find_verdict
from shoal.view.run_table import RunRow, read_held_locks, read_row

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST_RUNS = 20
FEW_RUNS = 4
"""Runs up to which each chart has the extremes of groups of steps, and all columns."""
MOST_POINTS = 320
"""Points of a curve of more runs: means of groups of steps."""
FEW_KNOTS = 100
MANY_NUMBERS = ("loss", "grad_norm", "lr", "tokens", "step_s")
"""Columns that are read of more runs than `FEW_RUNS`."""


@dataclass(frozen=True)
class ComparisonRun:
    """One run of a comparison.

    Attributes:
        contents: its folder, with the points of its charts; its columns are empty.
        row: its state, as `shoal runs` shows it.
        verdict: in one line.
        series: losses, tokens and seconds by step.
        knots: (step, tokens, seconds) at some steps, for other x axes.
        keys: settings, plan and environment.
        step_s, rate: medians of the seconds of a step and of the tokens per second; None: unknown.
        validation, best_validation: the newest and the least validation loss.
        damaged_lines: of metrics.jsonl.
    """

    contents: RunContents
    row: RunRow
    verdict: str
    series: LossSeries
    knots: list[tuple[int, float, float]]
    keys: RunKeys
    step_s: float | None
    rate: float | None
    validation: float | None
    best_validation: float | None
    damaged_lines: int

    @property
    def label(self) -> str:
        """Return its name, which no other run of the comparison has."""
        return self.contents.label

    @property
    def unit(self) -> str:
        """Return what its steps count: the targets of samples and of own loops, else tokens."""
        return "targets" if self.contents.plan.get("unit") in ("samples", "targets") else "tokens"


def read_compared_runs(folders: Sequence[Path]) -> tuple[list[ComparisonRun], list[str]]:
    """Read the runs of a comparison.

    Args:
        folders: at most `MOST_RUNS`, in the order of the user; also damaged and missing ones.

    Returns:
        the runs that can be read, and a line per folder that cannot.

    Raises:
        ConfigError: too many folders, or no run in any of them.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(
            f"shoal report: {len(folders)} runs, but a report shows at most {MOST_RUNS}; "
            "try: fewer runs"
        )
    paths, problems = _list_run_folders(folders)
    if not paths:
        raise ConfigError("; ".join(problems))
    runs: list[ComparisonRun] = []
    for path, label in zip(paths, unique_labels(paths), strict=True):
        try:
            runs.append(_read_compared_run(path, label, is_one_of_few=len(paths) <= FEW_RUNS))
        except (*DAMAGED, ArithmeticError, RecursionError, ShoalError, OSError) as failure:
            problems.append(f"{path}: left out, its records are damaged ({type(failure).__name__})")
    if not runs:
        raise ConfigError("; ".join(problems))
    return runs, problems


def _list_run_folders(folders: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Return the run folders, an island at a time, and a line per path that is none."""
    found: dict[Path, Path] = {}
    problems = []
    for folder in folders:
        try:
            check_run_folder(folder)
            islands = list_islands(folder) or [folder]
            known = [path.resolve() in found for path in islands]
        except (ConfigError, OSError, ValueError) as failure:
            problems.append(str(failure))
            continue
        if all(known):
            problems.append(f"{folder}: named twice, and shown once")
        found.update((path.resolve(), path) for path in islands if path.resolve() not in found)
    paths = list(found.values())
    for path in paths[MOST_RUNS:]:
        problems.append(f"{path}: left out, a report shows at most {MOST_RUNS} runs and islands")
    return paths[:MOST_RUNS], problems


def unique_labels(paths: Sequence[Path]) -> list[str]:
    """Return for each path its shortest end that no other path has, for the legend.

    >>> unique_labels([Path("/a/x"), Path("/a/y"), Path("/b/x")])
    ['a/x', 'y', 'b/x']
    """
    parts = [path.resolve().parts for path in paths]
    labels = []
    for own in parts:
        ends = (own[-count:] for count in range(1, len(own) + 1))
        end = next((e for e in ends if sum(one[-len(e) :] == e for one in parts) == 1), own)
        labels.append(clean_text("/".join(end)))
    if len(set(labels)) < len(labels):  # letters that are not shown were the difference
        return [f"{label} ({number})" for number, label in enumerate(labels, 1)]
    return labels


def _read_compared_run(folder: Path, label: str, *, is_one_of_few: bool) -> ComparisonRun:
    metrics = read_step_metrics(
        folder / "metrics.jsonl", numbers=NUMBERS if is_one_of_few else MANY_NUMBERS
    )
    events, counts = read_events(folder / "events.jsonl")
    ranks = read_bounded_object(folder / "ranks.json").get("ranks")
    contents = RunContents(
        folder=folder,
        label=label,
        plan=read_bounded_object(folder / "plan.json"),
        metrics=metrics,
        newest=[],
        events=[event for event in events if event["event"] in ("validated", "compute_started")],
        event_counts=counts,
        ranks=[one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else [],
        saved=list_saved_steps(folder),
        reduce=sample_series if is_one_of_few else sample_means,
    )
    contents.rank_times = None  # the page has no times by rank
    losses = [e["loss"] for e in contents.named("validated") if is_number(e.get("loss"))]
    step_s, rate = _median(metrics, "step_s"), _median(metrics, "tokens_per_s")
    series = _loss_series(metrics)
    knots = sample_knots(metrics) if is_one_of_few else sample_knots(metrics, FEW_KNOTS)
    for name in metrics.columns:
        contents.sample(name)
    contents.metrics = StepMetrics(columns=dict.fromkeys(metrics.columns, array("d")))
    return ComparisonRun(
        contents=contents,
        row=read_row(folder, folder, time.time(), read_held_locks()),
        verdict=find_verdict(folder).line(),
        series=series,
        knots=knots,
        keys=read_run_keys(contents),
        step_s=step_s,
        rate=rate,
        validation=losses[-1] if losses else None,
        best_validation=min(losses, default=None),
        damaged_lines=metrics.damaged,
    )


def sample_means(steps: Sequence[int], values: Sequence[float]) -> SampledSeries:
    """Reduce a series to the means of `MOST_POINTS` groups of steps, each at its last step.

    >>> len(sample_means(range(100_000), [1.0] * 100_000).values)
    320
    """
    count = len(values)
    if count <= MOST_POINTS:
        return SampledSeries(list(steps), list(values), count=count)
    import numpy as np

    numbers = np.asarray(values, np.float64)
    edges = np.arange(MOST_POINTS + 1) * count // MOST_POINTS
    with np.errstate(over="ignore"):
        means = np.add.reduceat(numbers, edges[:-1]) / np.diff(edges)
    last = edges[1:] - 1
    means = np.where(np.isfinite(means), means, numbers[last])
    return SampledSeries(np.asarray(steps)[last].tolist(), means.tolist(), count=count)


def _median(metrics: StepMetrics, name: str) -> float | None:
    """Return the median of the newest 10,000 values of a column, without the first of a run."""
    import numpy as np

    newest = np.array(metrics.column(name)[1][-10_000:])
    return float(median(newest[1:] if len(newest) > 1 else newest)) if len(newest) else None


def _loss_series(metrics: StepMetrics) -> LossSeries:
    import numpy as np

    count = len(metrics.steps)
    losses = np.array(metrics.columns.get("loss", array("d")), np.float64)
    sums = [np.array(metrics.running_sum(name), np.float64) for name in ("tokens", "step_s")]
    return LossSeries(
        np.array(metrics.steps, np.int64),
        losses if len(losses) == count else np.full(count, np.nan),
        *(one if len(one) == count else np.zeros(0) for one in sums),
    )
