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

import time
from pathlib import Path

from shoal.view.metrics_server.exposition import MetricFamily, SamplePage, label_value
from shoal.view.run_table import RunRow, list_runs

MOST_RUNS = 200
"""Runs on a page, those with the newest sign of life."""
STATES = ("starting", "running", "silent", "hung", "stopped", "ended", "killed", "abandoned")

FAMILIES = (
    MetricFamily("shoal_runs", "gauge", "Runs in the folder, by state."),
    MetricFamily("shoal_run_state", "gauge", "1 for the state of a run, 0 for the other states."),
    MetricFamily("shoal_run_step", "gauge", "Newest step of a run."),
    MetricFamily("shoal_run_steps", "gauge", "Steps that a run is to make."),
    MetricFamily("shoal_run_loss", "gauge", "Loss of the newest step."),
    MetricFamily("shoal_run_validation_loss", "gauge", "Newest validation loss."),
    MetricFamily("shoal_run_tokens_per_second", "gauge", "Tokens per second, mean of 20 steps."),
    MetricFamily("shoal_run_samples_per_second", "gauge", "Samples per second, mean of 20 steps."),
    MetricFamily(
        "shoal_run_started_timestamp_seconds", "gauge", "Start of the run's last session."
    ),
    MetricFamily(
        "shoal_run_last_sign_of_life_timestamp_seconds", "gauge", "Newest write of the run."
    ),
)


def format_page(folder: Path, now_s: float | None = None) -> str:
    """Return the page of all runs in a folder.

    Args:
        folder: a run folder, or one that holds some.
        now_s: the time, seconds since 1970; None: now.
    """
    rows = list_runs(folder, now_s or time.time())
    page = SamplePage(FAMILIES)
    for state in STATES:
        page.add("shoal_runs", sum(row.state == state for row in rows), state=state)
    for row in rows[:MOST_RUNS]:
        _add_row(page, label_value(row.name), row)
    return page.text()


def _add_row(page: SamplePage, run: str, row: RunRow) -> None:
    for state in STATES:
        page.add("shoal_run_state", int(row.state == state), run=run, state=state)
    page.add("shoal_run_step", row.step, run=run)
    page.add("shoal_run_steps", row.steps or None, run=run)
    page.add("shoal_run_loss", row.loss, run=run)
    page.add("shoal_run_validation_loss", row.validation, run=run)
    page.add(f"shoal_run_{row.unit}_per_second", row.rate, run=run)
    page.add("shoal_run_started_timestamp_seconds", row.started_s or None, run=run)
    page.add("shoal_run_last_sign_of_life_timestamp_seconds", row.last_sign_s or None, run=run)
