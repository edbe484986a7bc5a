"""Lines of `shoal trace`: a table by rank, and what the checks found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.base.text.units import seconds_text
from shoal.view.traces.trace_summary import RankSummary

HEAD = ("rank", "wall", "compute", "comm. alone", "comm. hidden", "idle")


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
