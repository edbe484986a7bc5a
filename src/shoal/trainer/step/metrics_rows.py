"""Rows of metrics.jsonl: one JSON line per step, written by rank 0 (`World.writes_files`).

Keys every row has: step loss grad_norm lr tokens step_s tokens_per_s mfu peak_memory_bytes
comm_bytes comm_exposed_s data_wait_s. A row also has bytes by kind of collective and by axis,
the stream positions [from, to) that the step consumed, and whether it was skipped.

A run without a folder, callbacks and a trace has no rows, and does not load this module.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.base.runlog.events import append_lines
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric.device import device_utilisation
from shoal.machine.process_memory import peak_memory_bytes
from shoal.trainer.metrics_recorder import MetricsRecorder
from shoal.trainer.step.optimizer_step import StepResult, StepTotals
from shoal.wire import phases

ROWS_S = 0.25
"""Seconds for which rows of fast steps wait, at most, for a common write."""


def build_row(
    result: StepResult,
    tally: StepTotals,
    batch: Any,
    data_wait_s: float,
    extras: dict[str, Any],
) -> tuple[dict[str, Any], int]:
    """Return (the numbers of a step, samples of the whole step; 0 if unknown).

    Args:
        result: of the step.
        tally: totals of the step.
        batch: this rank's batch.
        data_wait_s: seconds that the step waited for it.
        extras: further keys of the row.
    """
    samples = 0
    if isinstance(batch, StepBatch):
        extras = {**extras, "samples": [batch.position, batch.next_position]}
        samples = batch.next_position - batch.position - int(sum(tally.numbers.sums("unreadable")))
    row = {
        "step": result.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": result.targets,
        "data_wait_s": data_wait_s,
        "skipped": result.skipped,
        **({"metrics": result.metrics} if result.metrics else {}),
        **extras,
    }
    return row, samples


def write_row(recorder: MetricsRecorder, row: dict[str, Any], samples: int) -> dict[str, Any]:
    """Complete the row of one step; write it, pass it to callbacks, and return it.

    Args:
        recorder: of the run.
        row: step, loss, grad_norm, lr, tokens, data_wait_s and extras.
        samples: samples of the whole step, over all ranks.
    """
    recorder.apply_rewind()
    world, now_s = recorder.world, time.perf_counter()
    step_s = now_s - recorder.waiting_since_s
    recorder.waiting_since_s = now_s
    by_axis = world.traffic.bytes_by_axis()
    sent, exposed_s = world.traffic.pop_counts()
    mfu = _compute_mfu(recorder, samples, step_s)
    row = {
        **row,
        "peak_memory_bytes": peak_memory_bytes(world.device, fresh=row["step"] <= 8),
        "step_s": step_s,
        "tokens_per_s": row["tokens"] / step_s if step_s > 0 else 0.0,
        "mfu": mfu,
        "comm_bytes": sum(sent.values()),
        "comm_bytes_by_kind": sent,
        "comm_bytes_by_axis": by_axis,
        "comm_exposed_s": exposed_s,
        "timed_by": recorder.clock,
        "gpu_utilisation": device_utilisation(world.device),
    }
    if recorder.folder is not None and world.writes_files:
        recorder.rows.append(row)
        if recorder.rows_due_s <= now_s:
            flush_rows(recorder)
    phases.record_step_part(phases.HOOKS)
    for listen in recorder.events.listeners:
        listen({"event": "step", "rank": world.rank, **row})
    if phases.page is not None:
        phases.page.record_step_end(row["step"], row["peak_memory_bytes"], recorder.folder)
    if recorder.trace is not None:
        recorder.trace.after(row["step"])
    return row


@contextmanager
def write_rows_together(recorder: MetricsRecorder) -> Iterator[None]:
    """Write the rows of the steps inside by one call at the end, or each ROWS_S seconds.

    A step of a small model takes a millisecond, and a write with its checks a tenth of that. For
    steps that nobody resumes in between.
    """
    recorder.rows_due_s = time.perf_counter() + ROWS_S
    try:
        yield
    finally:
        recorder.rows_due_s = 0.0
        flush_rows(recorder)


def flush_rows(recorder: MetricsRecorder) -> None:
    """Append the rows that wait to metrics.jsonl; only ranks that write files have any."""
    rows = recorder.rows
    if not rows or recorder.folder is None:
        return
    recorder.rows = []
    if recorder.rows_due_s:
        recorder.rows_due_s = time.perf_counter() + ROWS_S
    try:
        recorder.recreate_folder()
        owner = recorder.owner
        place = owner.current_path() if owner is not None else recorder.folder
        append_lines(place / "metrics.jsonl", rows)
    except OSError:
        recorder.events.dropped += len(rows)  # a full disk must not stop training


def _compute_mfu(recorder: MetricsRecorder, samples: int, step_s: float) -> float | None:
    """Return the share of the machine's rate that a step used; None if it cannot be right."""
    if not (recorder.flops_per_sample and recorder.machine_flops_per_s and step_s > 0):
        return None
    share = recorder.flops_per_sample * samples / step_s / recorder.machine_flops_per_s
    if share <= 1:
        return share
    recorder.machine_flops_per_s = None
    if recorder.world.is_first:
        recorder.notice(recorder.passed())
    return None
