"""Numbers of a report as one JSON record: bounded, whatever the run's size."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.base.runlog.damaged_lines import Record, is_number, replace_non_finite
from shoal.base.runlog.rank_records import PARTS
from shoal.base.text.forecast_text import ratio_text
from shoal.base.text.units import bytes_text, seconds_text
from shoal.report.owner_figures import read_owner_validation
from shoal.report.run_contents import RunContents
from shoal.report.run_starts import list_starts
from shoal.report.sections.measured_costs import (
    forecast_pairs,
    fullest_name,
    median_of,
    median_rate,
    peak_of,
)
from shoal.report.verdict.forecast_gap import parts_text
from shoal.report.verdict.run_verdict import Verdict
from shoal.view.diagnose import read_continuation
from shoal.view.progress import count_unit
from shoal.view.run_table import read_held_locks, read_row

MOST_RANKS, MOST_STARTS, MOST_OWNERS = 64, 100, 100
"""Ranks with means, the latest first · newest starts · owners, the worst first."""
MOST_NAMES = 4
"""Islands that the line on verdicts names."""


ELSEWHERE = "each group of processes has its own"
"""Beginning of the verdict of a run of islands, whose steps are in their own folders."""


def report_record(run: RunContents, verdict: Verdict) -> Record:
    """Return the numbers of the page: state, figures, verdict, goodput, starts, means by rank.

    Args:
        run: the folder's contents.
        verdict: on the same folder.
    """
    row = read_row(run.folder, run.folder, time.time(), read_held_locks())
    losses, steps, of = run.metrics.column("loss")[1], run.metrics.steps, run.plan.get("steps")
    validated = [e["loss"] for e in run.named("validated") if is_number(e.get("loss"))]
    goodput, onward = run.goodput, read_continuation(run.folder)
    starts, owners = list_starts(run.events), read_owner_validation(run)
    if run.islands:  # whose folder has no steps of its own
        losses = [row.loss] if row.loss is not None else []
        longest = max(run.islands, key=lambda one: max(one.metrics.steps, default=0))
        steps, of = longest.metrics.steps, longest.plan.get("steps")
        told = run.islands[0].named("validated")  # every island has those of all owners
        validated = [e["loss"] for e in told if is_number(e.get("loss"))]
    record = {
        "verdict": _verdict_text(run, verdict),
        "verdict_kind": verdict.kind,
        "verdict_cause": verdict.cause,
        "verdict_evidence": list(verdict.evidence),
        "verdict_share": verdict.share,
        "verdict_step_s": verdict.step_s,
        "verdict_without_s": verdict.without_s,
        "verdict_steps": verdict.steps,
        "verdict_parts_s": verdict.parts_s,
        "verdict_command": verdict.command,
        "state": row.state,
        "how": row.how,
        "step": steps[-1] if steps else 0,
        "steps": int(of) if is_number(of) else None,
        "loss": losses[-1] if losses else None,
        "validation_loss": validated[-1] if validated else None,
        "owners": None
        if owners is None
        else {
            "step": owners.event.get("step"),
            "loss": owners.event.get("loss"),
            "worst": owners.event.get("worst"),
            "larger_worst": owners.larger_worst or None,
            "by_owner": dict(owners.rows[:MOST_OWNERS]),
            "lines": owners.lines(),
        },
        "median_step_s": median_of(run, "step_s"),
        f"median_{count_unit(run.plan)}_per_s": median_rate(run),
        "peak_memory_bytes": peak_of(run),
        "peak_memory_of": fullest_name(run),
        "forecast": {
            key: {"foreseen": foreseen, "measured": measured}
            for key, (foreseen, measured) in forecast_pairs(run).items()
        },
        "layout": row.layout,
        "goodput_share": None if run.islands else goodput.session_share,
        "goodput_share_of": "session_s",
        "session_s": goodput.session_s,
        "session_starts_s": list(goodput.session_starts[-MOST_STARTS:]),
        "goodput_parts_s": goodput.parts(),
        "wall_s": goodput.wall_s,
        "device_hours": goodput.device_hours,
        "repeated_steps": goodput.lost_steps,
        "starts": len(starts),
        "started_s": starts[0].time_s if starts else None,
        "newest_starts": [
            {"time_s": start.time_s, "resumed_from_step": start.step}
            for start in starts[-MOST_STARTS:]
        ],
        "saved_steps": run.saved[-MOST_STARTS:],
        "lost_steps": max(0, onward.last_step - (onward.saved_step or 0)) if onward else 0,
        "continuation": onward.record() if onward else None,
        "ranks": _rank_means(run),
    }
    return replace_non_finite(record)


def summary_lines(record: Record) -> list[str]:
    """Return the verdict, then state, losses, time of a step, its parts and memory, as text."""
    lines = [_state_line(record), *(record["owners"]["lines"] if record["owners"] else [])]
    # What other folders say stands after what this folder says.
    at = len(lines) if record["verdict"].startswith(ELSEWHERE) else 0
    lines.insert(at, f"verdict: {record['verdict']}")
    step_s, peak_bytes = record["median_step_s"], record["peak_memory_bytes"]
    if step_s:
        lines.append(f"a step, median: {_forecast_text(record, 'step_s', step_s, seconds_text)}")
    if record["verdict_parts_s"]:
        lines.append(f"of a step, mean of ranks: {parts_text(record['verdict_parts_s'])}")
    if peak_bytes:
        text = _forecast_text(record, "peak_memory_bytes", peak_bytes, bytes_text)
        lines.append(f"peak memory of {record['peak_memory_of']}: {text}")
    if (share := record["goodput_share"]) is not None:
        lines.append(f"goodput: {share:.0%} of the time in sessions went into committed steps")
    return lines


def _verdict_text(run: RunContents, verdict: Verdict) -> str:
    """Return the verdict; of islands, whose steps are in their own folders, where it is."""
    if not run.islands or verdict.kind != "nothing" or verdict.step_s is not None:
        return verdict.line()
    names = ", ".join(island.label for island in run.islands[:MOST_NAMES])
    return f"{ELSEWHERE} ({names}); try: shoal report {run.islands[0].folder}"


def _state_line(record: Record) -> str:
    """Return state, steps and the newest losses."""
    is_known = record["steps"] and record["step"] <= record["steps"]
    step = f"step {record['step']}" + (f" of {record['steps']}" if is_known else "")
    losses = [
        f"{name} {record[key]:.4f}"
        for name, key in (("loss", "loss"), ("validation loss", "validation_loss"))
        if record[key] is not None
    ]
    return f"run: {', '.join([record['state'], step, *losses])}"


def _forecast_text(record: Record, key: str, measured: float, text: Callable[[float], str]) -> str:
    """Return a figure as text, with its forecast where the plan has one."""
    foreseen = record["forecast"].get(key, {}).get("foreseen")
    if not foreseen:
        return text(measured)
    return f"{text(measured)}, {ratio_text(foreseen, measured)} the forecast of {text(foreseen)}"


def _rank_means(run: RunContents) -> list[Record]:
    """Return the mean seconds of a step by rank and part, of the latest ranks."""
    times = run.rank_times
    if times is None:
        return []
    latest = sorted(range(len(times.ranks)), key=lambda at: -float(times.late_s[at]))
    return [
        {
            "rank": times.ranks[at],
            "mean_step_s": float(times.mean_s[at].sum()),
            "mean_late_s": float(times.late_s[at]),
            "most_late_s": float(times.worst_s[at]),
            "first_step": times.first_step,
            "last_step": times.last_step,
            "mean_parts_s": dict(zip(PARTS, map(float, times.mean_s[at]), strict=True)),
        }
        for at in latest[:MOST_RANKS]
    ]
