"""Run the rows of `shoal compare`: one supervised group of processes per process count.

The processes of one count measure all rows of that count in turn, since a start costs seconds. When
one of them dies, the row that was running gets that death as its reason, and new processes measure
the remaining rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shoal.base.estimates.facts import MachineFacts
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.events import EventLog
from shoal.base.text.event_sentences import event_text
from shoal.cli.compare_rows import (
    COMPARED_STEPS,
    RowPlan,
    memory_shortage_text,
    training_state_bytes,
)
from shoal.cli.workers.worker import worker_environment, worker_imports
from shoal.config.load import LoadedConfig
from shoal.config.save import to_toml
from shoal.launch import supervise
from shoal.view.compare_progress import ComparisonProgress
from shoal.view.diagnose import WATCHED

FIRST_S, PATIENCE_S = 300.0, 180.0
"""Seconds of silence allowed before a step's time is known, and for a busy rank afterwards.

The sum is below the timeout of a collective, after which the supervisor would blame the waiting
ranks.
"""
LOOK_S = 0.3
"""Seconds for which the load of other processes on this machine is sampled."""


@dataclass
class LayoutComparison:
    """Request and results of one comparison.

    Attributes:
        rows: plans, in the order of the table.
        found: figures by the number of their row.
        said: facts that the workers reported: machine, unit.
        busy: share of this machine's cores that other work used just before the measurement.
    """

    loaded: LoadedConfig
    rows: list[RowPlan]
    parameters: int | None
    machine: MachineFacts
    steps: int
    folder: Path
    found: dict[int, dict[str, Any]] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    busy: float = 0.0


def measure_rows(comparison: LayoutComparison, *, quiet: bool) -> int:
    """Run every row that can run, and return an exit code: 0 if there is something to show.

    Args:
        comparison: the request; results are added to it.
        quiet: write no progress to standard output.
    """
    folder, rows = comparison.folder, comparison.rows
    comparison.busy = psutil.cpu_percent(LOOK_S) / 100
    write_atomically(folder / "run.toml", to_toml(comparison.loaded))
    asked = [
        {"layout": r.strategy, "parts": r.parts, "run": _parallelize_argument(r)} for r in rows
    ]
    request = {"steps": comparison.steps, "compared_steps": COMPARED_STEPS, "rows": asked}
    write_atomically(folder / "request.json", json.dumps(request, indent=1))
    for processes in sorted({row.processes for row in rows if row.runs}):
        while left := _unmeasured_rows(comparison, processes):
            if code := _run_world(comparison, processes, left, quiet):
                return code
    return 0


def _unmeasured_rows(comparison: LayoutComparison, processes: int) -> list[int]:
    """Return the unmeasured rows on `processes` processes; rows without memory get their reason."""
    left = []
    for number, row in enumerate(comparison.rows):
        done = number in comparison.found or not row.runs
        if done or row.layout is None or row.processes != processes:
            continue
        # The size of a user-built model is known only after the first row has run.
        need_bytes = training_state_bytes(row.layout, comparison.parameters or 0)
        machine = comparison.machine
        if need_bytes > machine.memory_bytes and not machine.gpus:
            reason = memory_shortage_text(row, need_bytes, comparison.parameters or 0, machine)
            comparison.found[number] = {"reason": reason}
            continue
        left.append(number)
    return left


def _parallelize_argument(row: RowPlan) -> str | dict[str, int]:
    """Return the row's layout as the argument that `parallelize` takes."""
    return {"threads": row.parts} if row.strategy == "dp" else row.strategy


def _run_world(
    comparison: LayoutComparison, processes: int, numbers: list[int], quiet: bool
) -> int:
    """Measure rows with one group of processes; their figures go to `comparison`.

    Returns:
        0, or an exit code if no further group may start.
    """
    folder = comparison.folder
    results = folder / "rows.jsonl"
    skip = len(results.read_text(encoding="utf-8").splitlines()) if results.exists() else 0
    asked = [(row.strategy, row.parts) for row in comparison.rows]
    waiting = ComparisonProgress(
        results, asked, sys.stderr if quiet else sys.stdout, quiet=quiet, skip=skip
    )
    deaths: list[dict[str, Any]] = []
    try:
        outcome = supervise(
            [sys.executable, "-m", "shoal.cli.workers.compare_worker", str(folder),
             ",".join(str(number) for number in numbers)],
            processes=processes,
            folder=folder,
            restarts=0,
            emit=_record_deaths(EventLog(folder / "events.jsonl", None), deaths),
            on_tick=waiting.tick,
            environ=_worker_environment(comparison),
            imports=worker_imports(comparison.loaded.config.model),
            first_s=FIRST_S,
            patience_s=PATIENCE_S,
        )  # fmt: skip
    finally:
        waiting.finish()
    began = None
    for record in _read_json_lines(results)[skip:]:
        if "machine" in record:
            comparison.said = {**record, **comparison.said}
        elif "began" in record:
            began = record["began"]
        else:
            comparison.found[record.pop("row")] = record
            comparison.parameters = comparison.parameters or record.get("parameters")
    if outcome.status == "finished":
        return 0
    if outcome.status == "stopped" or began is None or began in comparison.found:
        sys.stderr.write(f"shoal: {outcome.message}\n")
        return outcome.exit_code
    comparison.found[began] = {"reason": _death_reason(deaths) or outcome.message.splitlines()[0]}
    return 0


def _worker_environment(comparison: LayoutComparison) -> dict[str, str]:
    """Return the workers' environment, with the same number of threads per process in every row."""
    environ = worker_environment()
    most = max(row.parts for row in comparison.rows)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, comparison.machine.cores // most)))
    return environ


def _record_deaths(log: EventLog, deaths: list[dict[str, Any]]) -> Callable[..., None]:
    def emit(event: str, **fields: Any) -> None:
        if event == "worker_died":
            deaths.append(fields)
        log.emit(event, **fields)
        if event == "hang":
            sys.stderr.write(f"shoal: {event_text({'event': event, **fields})}\n")
            sys.stderr.flush()

    return emit


def _death_reason(deaths: list[dict[str, Any]]) -> str:
    """Return in one line why the processes of a row died."""
    if not deaths:
        return ""
    words = str(deaths[-1]["traceback"] or "").strip().splitlines()
    if deaths[-1]["how"] == WATCHED:
        return f"rank {deaths[-1]['rank']} {words[-1].strip()}"
    memory = " (often the kernel, out of memory)" if "SIGKILL" in deaths[-1]["how"] else ""
    return words[-1].strip() if words else f"{deaths[-1]['how']}{memory}"


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )
