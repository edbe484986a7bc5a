"""`shoal trace`: merge the traces of all ranks into one file, and sum them up; no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError
from shoal.base.text.units import seconds_text

if TYPE_CHECKING:
    from shoal.view.traces.trace_summary import RankSummary

RUN = typer.Argument(None, metavar="RUN", help="A run's folder with traces.")
OUT = typer.Option(None, "--out", metavar="FILE", help="Default: RUN/traces/steps-A-B.json.")
HEAD = ("rank", "wall", "compute", "comm. alone", "comm. hidden", "idle")
JSON = typer.Option(False, "--json", help="Print one JSON document.")


def trace(path: Path = RUN, out: Path = OUT, as_json: bool = JSON) -> None:
    """Merge the traces that train.trace=FIRST:LAST wrote, one per rank, into one file for Perfetto.

    For example: shoal trace runs/mine
    Clocks are aligned by the ends of collectives that all ranks made. A table says for each rank
    how long it computed, communicated alone or behind compute, and was idle. The file is checked:
    nesting, the order of calls, messages. Exit status: 0, 1 for a trace with faults, 2 for
    something to correct.
    """
    from shoal.base.runlog.rank_records import read_rank_steps
    from shoal.view.diagnosis.run_folders import explain_no_run, find_named_run
    from shoal.view.traces.merged_trace import merge_traces, write_merged
    from shoal.view.traces.rank_traces import read_rank_traces
    from shoal.view.traces.trace_checks import find_trace_faults
    from shoal.view.traces.trace_summary import differs_from_phases, summarize_traces

    if path is None:
        raise ConfigError("trace: no run is named; try: shoal trace runs/NAME")
    run = find_named_run(path)
    if not run.is_dir():
        raise ConfigError(explain_no_run(run))
    traces = read_rank_traces(run)
    document = merge_traces(traces)
    steps = traces[0].steps
    target = out or run / "traces" / f"steps-{steps[0]}-{steps[1]}.json"
    try:
        write_merged(target, document)
    except OSError as failure:
        raise ConfigError(f"--out {target}: {failure.strerror or failure}") from failure
    summaries = summarize_traces(traces)
    records = read_rank_steps(run) or []
    gaps = [differs_from_phases(one, records) for one in traces]
    faults = find_trace_faults(document, traces)
    if as_json:
        found = {
            "file": str(target),
            "steps": list(steps),
            "clock_error_us": document["otherData"]["clock_error_us"],
            "ranks": [asdict(one) for one in summaries],
            "differs_from_phases": gaps,
            "faults": faults,
        }
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo("\n".join(summary_lines(target, steps, summaries, gaps, faults)))
    raise typer.Exit(1 if faults else 0)


def summary_lines(
    file: Path,
    steps: tuple[int, int],
    summaries: Sequence[RankSummary],
    gaps: Sequence[float | None],
    faults: Sequence[str],
) -> list[str]:
    """Return the lines about a merged trace.

    Args:
        file: the merged trace.
        steps: first and last traced step.
        summaries: of each rank.
        gaps: of `differs_from_phases` for each rank.
        faults: of `find_trace_faults`.
    """
    rows: list[tuple[str, ...]] = [HEAD]
    for one in summaries:
        parts = (one.compute_s, one.alone_s, one.hidden_s, one.idle_s)
        cells = (f"{seconds_text(part)} {part / one.wall_s:4.0%}" for part in parts)
        rows.append((str(one.rank), seconds_text(one.wall_s), *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    known = [gap for gap in gaps if gap is not None]
    if known:
        lines.append(
            f"within {max(known):.1%} of the run's own seconds by part of a step (rank_steps)"
        )
    lines += [f"fault: {one}" for one in faults]
    if not faults:
        lines.append("checked: form, nesting, the order of calls and messages on all ranks")
    lines.append(f"steps {steps[0]} to {steps[1]} of {len(summaries)} ranks: {file}")
    lines.append("open it: https://ui.perfetto.dev, or chrome://tracing")
    return lines
