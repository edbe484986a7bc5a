"""Contents of a run folder for a report: read once, tolerant of damage, bounded in memory.

    metrics.jsonl   columns (metric_series.py)        plan.json     layout, forecast
    events.jsonl    the newest of each kind           ranks.json    host and device of each rank
    rank_steps/     seconds by rank (rank_times.py)   experts.jsonl tokens of each expert
    devices.jsonl   use of each device                checkpoints/  versions, source digests

Any file may be missing: older versions wrote fewer, own loops have no run.toml.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.runlog.atomic_files import list_saved_steps
from shoal.base.runlog.damaged_lines import (
    Record,
    is_number,
    parse_event,
    parse_object,
    read_newest_steps,
    read_object,
)
from shoal.report.goodput import Goodput, compute_goodput
from shoal.report.metric_series import (
    SampledSeries,
    StepMetrics,
    iter_blocks,
    read_step_metrics,
    sample_series,
)
from shoal.report.rank_times import RankTimes, read_rank_times
from shoal.view.diagnosis.run_folders import explain_no_run

MOST_EVENTS = 2_000
"""Events of one name that are kept: the newest."""
MOST_LOG_BYTES = 1 << 28
MOST_OBJECT_BYTES = 1 << 26
"""Size of a JSON file above which it is not read."""
MARKING = ("spike", "step_skipped", "rewound")
"""Events that mark a step of the curves."""
READ_SUFFIXES = (".json", ".jsonl", ".toml", ".lock")
MOST_MARKS = 200
MOST_ISLANDS = 8
NEWEST_ROWS = 1_000
"""Newest rows of metrics.jsonl from which bytes by axis and collective are averaged."""


@dataclass
class RunContents:
    """A run folder as a report shows it.

    Attributes:
        folder: its path.
        label: name in a legend.
        plan: plan.json.
        metrics: columns of metrics.jsonl.
        newest: its last rows, whole.
        events: by time.
        event_counts: number of events by name, with those that were not kept.
        ranks: entries of ranks.json.
        saved: steps with a complete checkpoint.
        islands: of a run of islands, whose own folder has no steps, the runs of the islands.
        reduce: makes the points of a chart from the steps and values of a column.
    """

    folder: Path
    label: str
    plan: Record
    metrics: StepMetrics
    newest: list[Record]
    events: list[Record]
    event_counts: dict[str, int] = field(default_factory=dict)
    ranks: list[Record] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    islands: list[RunContents] = field(default_factory=list)
    reduce: Callable[[Sequence[int], Sequence[float]], SampledSeries] = sample_series
    _sampled: dict[str, SampledSeries] = field(default_factory=dict, repr=False)

    def sample(self, name: str) -> SampledSeries:
        """Return a column of metrics.jsonl with as many points as a chart shows."""
        if name not in self._sampled:
            self._sampled[name] = self.reduce(*self.metrics.column(name))
        return self._sampled[name]

    @property
    def curve_runs(self) -> list[RunContents]:
        """Runs whose curves are drawn: the islands, or the run itself."""
        return self.islands or [self]

    @cached_property
    def rank_times(self) -> RankTimes | None:
        """Times by rank; None if no watchdog recorded any. Read at the first use."""
        steps = self.metrics.steps
        return read_rank_times(self.folder, steps[-1] if steps else None)

    @cached_property
    def goodput(self) -> Goodput:
        """Parts of the wall time. Computed at the first use."""
        return compute_goodput(self.folder, self.metrics)

    def named(self, *names: str) -> list[Record]:
        """Return the events of some names, by time."""
        return [event for event in self.events if event["event"] in names]

    @property
    def marked_steps(self) -> list[int]:
        """Steps with a spike, a skip or a rewind, ascending."""
        return sorted(_marked_steps(self.events))


def check_run_folder(folder: Path) -> None:
    """Refuse a path that is no run folder.

    Raises:
        ConfigError: no such folder, nothing of a run in it, or a pipe in place of a file.
    """
    if not any((folder / name).exists() for name in ("events.jsonl", "metrics.jsonl")):
        raise ConfigError(explain_no_run(folder))
    for path in folder.iterdir():  # to open a pipe would wait for its writer
        if path.suffix in READ_SUFFIXES and (path.is_fifo() or path.is_char_device()):
            raise ConfigError(f"{path}: no file but a pipe or a device; try: remove it")


def read_run(folder: Path) -> RunContents:
    """Read a run folder.

    Raises:
        ConfigError: there is no such folder, or nothing of a run in it.
    """
    check_run_folder(folder)
    events, counts = read_events(folder / "events.jsonl")
    marks = _marked_steps(events)
    around = {step + shift for step in marks for shift in (-1, 0, 1)}
    ranks = read_bounded_object(folder / "ranks.json").get("ranks")
    return RunContents(
        folder=folder,
        label=folder.resolve().name,
        plan=read_bounded_object(folder / "plan.json"),
        metrics=read_step_metrics(folder / "metrics.jsonl", keep=around),
        newest=read_newest_steps(folder / "metrics.jsonl", NEWEST_ROWS),
        events=events,
        event_counts=counts,
        ranks=[one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else [],
        saved=list_saved_steps(folder),
        islands=[read_run(one) for one in list_islands(folder)],
    )


def list_islands(folder: Path) -> list[Path]:
    """Return the folders of the islands of a run that has no steps of its own."""
    if (folder / "metrics.jsonl").exists():
        return []
    return sorted(path.parent for path in folder.glob("island-*/events.jsonl"))[:MOST_ISLANDS]


def read_bounded_object(path: Path, most_bytes: int = MOST_OBJECT_BYTES) -> Record:
    """Return the JSON object of a file; {} if it is missing, damaged or larger than any of ours."""
    try:
        if path.stat().st_size > most_bytes:
            return {}
    except OSError:
        return {}
    return read_object(path)


def read_events(path: Path) -> tuple[list[Record], dict[str, int]]:
    """Return the newest events of each name, by time, and the number of all by name."""
    kept: dict[str, deque[tuple[int, Record]]] = {}
    counts: dict[str, int] = {}
    number = 0
    for block in iter_blocks(path, MOST_LOG_BYTES):
        for line in block.splitlines():
            if (event := parse_event(line)) is None:
                continue
            name, number = event["event"], number + 1
            if name not in kept and len(kept) > 100:
                name = "other"
            counts[name] = counts.get(name, 0) + 1
            kept.setdefault(name, deque(maxlen=MOST_EVENTS)).append((number, event))
    found = sorted((pair for queue in kept.values() for pair in queue), key=lambda pair: pair[0])
    return [event for _, event in found], counts


def iter_records(path: Path, most_bytes: int = MOST_LOG_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines, without damaged ones."""
    for block in iter_blocks(path, most_bytes):
        for line in block.splitlines():
            if (record := parse_object(line)) is not None:
                yield record


def _marked_steps(events: list[Record]) -> set[int]:
    found = [event.get("step") for event in events if event["event"] in MARKING]
    steps = [int(step) for step in found if is_number(step) and 0 <= step < 1 << 53]
    return set(steps[-MOST_MARKS:])
