"""Samples of the runs in a folder: state, step, loss, rates, waits, memory, devices, counts.

A run has one series per metric, and never one per rank: of ranks and devices the page has the
minimum, the maximum and the worst rank. So a run of 1,024 ranks costs as much as one of two.

    source              samples
    run_table's row     state, step, loss, validation, rate, times
    metrics.jsonl       learning rate, norm, seconds of a step, exposed communication, memory
    rank_steps/*.bin    wait and memory over ranks, the worst rank
    devices.jsonl       utilisation, memory, power and temperature over devices
    events.jsonl        counts: starts, restarts, skipped steps, spikes, hangs, saves
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.runlog.log_tails import (
    EventCounts,
    find_worst_rank,
    read_devices,
    read_rank_medians,
    read_steps,
)
from shoal.view.diagnosis.folder_state import ALIVE, WRONG
from shoal.view.metrics_server.exposition import MetricFamily, SamplePage, label_value
from shoal.view.run_table import RunRow, list_runs

MOST_RUNS = 200
"""Runs on a page, those with the newest sign of life."""
STATES = tuple(dict.fromkeys((*ALIVE, "stopped", "ended", *WRONG)))
"""States of a run, as `shoal runs` lists them."""

COUNTED = {
    "run_started": ("shoal_run_starts_total", "Starts of a run, resumes included."),
    "restarting": ("shoal_run_restarts_total", "Automatic restarts after a rank died or hung."),
    "worker_died": ("shoal_run_worker_deaths_total", "Processes that died."),
    "hang": ("shoal_run_hangs_total", "Hangs that the watchdog named."),
    "step_skipped": ("shoal_run_skipped_steps_total", "Steps whose update was not made."),
    "spike": ("shoal_run_spikes_total", "Spikes of loss or gradient norm."),
    "checkpoint_saved": ("shoal_run_checkpoints_saved_total", "Checkpoints written."),
    "checkpoint_failed": ("shoal_run_checkpoints_failed_total", "Saves that did not complete."),
}
"""Event → the counter of it, and its help."""

OF_STEP = {
    "grad_norm": ("shoal_run_gradient_norm", "Gradient norm of the newest step."),
    "lr": ("shoal_run_learning_rate", "Learning rate of the newest step."),
    "peak_memory_bytes": ("shoal_run_peak_memory_bytes", "Peak memory of rank 0."),
}
"""Field of the newest step's row → the gauge of it, and its help."""

MEANS = {
    "step_s": ("shoal_run_step_seconds", "Seconds of a step, mean of 20 steps."),
    "comm_exposed_s": (
        "shoal_run_exposed_communication_seconds",
        "Seconds of a step in which rank 0 only communicated, mean of 20 steps.",
    ),
    "data_wait_s": (
        "shoal_run_data_wait_seconds",
        "Seconds of a step in which rank 0 waited for its batch, mean of 20 steps.",
    ),
    "mfu": ("shoal_run_mfu_ratio", "Model FLOPs utilisation, mean of 20 steps."),
}
"""Field of the newest steps' rows → the gauge of its mean, and its help."""

OF_RANKS = {
    "wait_s": ("shoal_rank_wait_seconds", "Seconds of a step in which a rank waits for others."),
    "busy_s": ("shoal_rank_busy_seconds", "Seconds of a step in which a rank does not wait."),
    "peak_memory_bytes": ("shoal_rank_peak_memory_bytes", "Peak memory of a rank."),
}
"""Field of RankMedians → the gauge of its minimum and maximum over ranks, and its help."""

OF_DEVICES = {
    "utilisation": ("shoal_device_utilisation_ratio", "Utilisation of a run's devices, 0 to 1."),
    "memory_used_bytes": ("shoal_device_memory_used_bytes", "Used memory of a run's devices."),
    "memory_total_bytes": ("shoal_device_memory_total_bytes", "Memory of a run's devices."),
    "power_w": ("shoal_device_power_watts", "Power of a run's devices."),
    "temperature_c": ("shoal_device_temperature_celsius", "Temperature of a run's devices."),
}
"""Field of a row of devices.jsonl → the gauge of its minimum and maximum, and its help."""


def _gauges(rows: Iterable[tuple[str, str]]) -> tuple[MetricFamily, ...]:
    return tuple(MetricFamily(name, "gauge", text) for name, text in rows)


FAMILIES = (
    *_gauges([
        ("shoal_runs", "Runs in the folder, by state."),
        ("shoal_run_info", "Always 1; labels: layout and unit (tokens, samples or targets)."),
        ("shoal_run_state", "1 for the state of a run, 0 for the other states."),
        ("shoal_run_step", "Newest step of a run."),
        ("shoal_run_steps", "Steps that a run is to make."),
        ("shoal_run_loss", "Loss of the newest step."),
        ("shoal_run_validation_loss", "Newest validation loss."),
        ("shoal_run_tokens_per_second", "Tokens per second, mean of 20 steps."),
        ("shoal_run_samples_per_second", "Samples per second, mean of 20 steps."),
        ("shoal_run_targets_per_second", "Targets per second of an own loop, mean of 20 steps."),
        *OF_STEP.values(),
        *MEANS.values(),
        ("shoal_run_started_timestamp_seconds", "Start of the run's last session."),
        ("shoal_run_last_sign_of_life_timestamp_seconds", "Newest write of the run."),
        ("shoal_run_ranks", "Ranks with records of the newest 20 steps."),
        *OF_RANKS.values(),
        ("shoal_run_worst_rank", "Number of the rank that the others wait for."),
        ("shoal_run_worst_rank_lateness_seconds", "Seconds of a step that others wait for it."),
        ("shoal_run_devices", "Devices with a record of the last minute."),
        *OF_DEVICES.values(),
    ]),
    *(MetricFamily(name, "counter", text) for name, text in COUNTED.values()),
)  # fmt: skip


class RunMetrics:
    """The metrics of all runs in a folder.

    Args:
        folder: a run folder, or one that holds some. It may change at any time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._events: dict[str, EventCounts] = {}

    def format_page(self, now_s: float | None = None) -> str:
        """Return the page of all runs.

        Args:
            now_s: the time, seconds since 1970; None: now.
        """
        rows = list_runs(self.folder, now_s or time.time())
        page = SamplePage(FAMILIES)
        counts = Counter(row.state for row in rows)
        for state in dict.fromkeys((*STATES, *counts)):
            page.add("shoal_runs", counts[state], state=state)
        shown = rows[:MOST_RUNS]
        for run, row in zip(name_runs(shown), shown, strict=True):
            _add_row(page, run, row)
            _add_steps(page, run, Path(row.path))
            _add_ranks(page, run, Path(row.path))
            _add_devices(page, run, read_devices(Path(row.path)))
            self._add_counts(page, run, row.path)
        paths = {row.path for row in shown}
        self._events = {path: one for path, one in self._events.items() if path in paths}
        return page.text()

    def _add_counts(self, page: SamplePage, run: str, path: str) -> None:
        if path not in self._events:
            self._events[path] = EventCounts(Path(path) / "events.jsonl", COUNTED)
        events = self._events[path]
        events.update()
        for event, count in events.counts.items():
            page.add(COUNTED[event][0], count, run=run)


def name_runs(rows: Sequence[RunRow]) -> list[str]:
    """Return a label for each run, no two equal.

    Names that are blank, or differ only in what a label cannot show, get a digest of their path.
    """
    labels = [label_value(row.name) for row in rows]
    counts = Counter(labels)
    return [
        label if label.strip() and counts[label] == 1 else f"{label}~{_path_digest(row.path)}"
        for label, row in zip(labels, rows, strict=True)
    ]


def _path_digest(path: str) -> str:
    return hashlib.blake2b(os.fsencode(path), digest_size=6).hexdigest()


def _add_row(page: SamplePage, run: str, row: RunRow) -> None:
    page.add("shoal_run_info", 1, run=run, layout=label_value(row.layout), unit=row.unit)
    for state in dict.fromkeys((*STATES, row.state)):
        page.add("shoal_run_state", int(row.state == state), run=run, state=state)
    page.add("shoal_run_step", row.step, run=run)
    page.add("shoal_run_steps", row.steps or None, run=run)
    page.add("shoal_run_loss", row.loss, run=run)
    page.add("shoal_run_validation_loss", row.validation, run=run)
    page.add(f"shoal_run_{row.unit}_per_second", row.rate, run=run)
    page.add("shoal_run_started_timestamp_seconds", row.started_s or None, run=run)
    page.add("shoal_run_last_sign_of_life_timestamp_seconds", row.last_sign_s or None, run=run)


def _add_steps(page: SamplePage, run: str, path: Path) -> None:
    steps = read_steps(path)
    for key, (name, _) in OF_STEP.items():
        page.add(name, steps[-1].get(key) if steps else None, run=run)
    for key, (name, _) in MEANS.items():
        values = [step[key] for step in steps if is_number(step.get(key))]
        page.add(name, sum(values) / len(values) if values else None, run=run)


def _add_ranks(page: SamplePage, run: str, path: Path) -> None:
    ranks = read_rank_medians(path)
    page.add("shoal_run_ranks", len(ranks) or None, run=run)
    for key, (name, _) in OF_RANKS.items():
        _add_extremes(page, name, run, [getattr(rank, key) for rank in ranks])
    if (worst := find_worst_rank(ranks)) is not None:
        page.add("shoal_run_worst_rank", worst[0], run=run)
        page.add("shoal_run_worst_rank_lateness_seconds", worst[1], run=run)


def _add_devices(page: SamplePage, run: str, devices: list[Record]) -> None:
    page.add("shoal_run_devices", len(devices) or None, run=run)
    for key, (name, _) in OF_DEVICES.items():
        _add_extremes(page, name, run, [one[key] for one in devices if is_number(one.get(key))])


def _add_extremes(page: SamplePage, name: str, run: str, values: Sequence[float]) -> None:
    if values:
        page.add(name, min(values), run=run, stat="min")
        page.add(name, max(values), run=run, stat="max")
