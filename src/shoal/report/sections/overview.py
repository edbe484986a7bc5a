"""First section: the verdict in one sentence, then the key figures of the run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from shoal.base.layouts.layout import Layout
from shoal.base.runlog.damaged_lines import is_number
from shoal.base.text.units import bytes_text, count_text, seconds_text
from shoal.report.markup import Child, Markup, tag
from shoal.report.run_contents import RunContents
from shoal.report.verdict.run_verdict import Verdict, find_verdict
from shoal.view.progress import count_unit
from shoal.view.run_table import read_held_locks, read_row


def overview_section(run: RunContents) -> Markup:
    """Return the verdict and the key figures."""
    verdict = find_verdict(run.folder)
    return tag(
        "section",
        [
            tag("p", "Shoal report", class_="kicker"),
            tag("h1", run.label),
            tag("p", _state_text(run), class_="lead"),
            _verdict_box(verdict),
            _islands_text(run),
            _figures(run),
        ],
        id="verdict",
    )


def _islands_text(run: RunContents) -> Child:
    """Return the islands of a run, each of which has a folder and a report of its own."""
    if not run.islands:
        return None
    names = ", ".join(island.label for island in run.islands)
    text = f"A run of islands: {names}. Each has ranks, times and a verdict of its own: "
    return tag("p", text, tag("code", f"shoal report {run.folder / run.islands[0].label}"))


def _verdict_box(verdict: Verdict) -> Markup:
    known = verdict.step_s is not None
    look = {"fault": "bad", "nothing": "good" if known else ""}.get(verdict.kind, "warn")
    headline, _, cure = verdict.line().partition("; try: ")
    parts: list[Child] = [
        tag("p", headline[:1].upper() + headline[1:], class_="headline"),
        tag("p", "Try ", tag("code", cure), class_="cure") if cure else None,
    ]
    if verdict.share is not None and verdict.step_s and verdict.without_s is not None:
        parts.append(_saving_bar(verdict.step_s, verdict.without_s))
    parts += [tag("p", sentence, class_="evidence") for sentence in verdict.evidence]
    return tag("div", parts, class_=f"verdict {look}".rstrip())


def _saving_bar(step_s: float, without_s: float) -> Markup:
    """Return two bars: a step now, and a step without the cause."""
    rows = []
    for name, seconds, look in (("now", step_s, "s1"), ("without it", without_s, "s0")):
        share = max(0.0, min(1.0, seconds / step_s if step_s else 0.0))
        box = tag("rect", x="0", y="0", width=f"{1000 * share:.0f}", height="10", class_=look)
        bar = tag("svg", box, viewBox="0 0 1000 10", preserveAspectRatio="none", class_="bar")
        cells = [
            tag("td", name),
            tag("td", bar, class_="b"),
            tag("td", seconds_text(seconds), class_="n"),
        ]
        rows.append(tag("tr", cells))
    return tag("table", tag("tbody", rows), class_="saving")


def _state_text(run: RunContents) -> str:
    row = read_row(run.folder, run.folder, time.time(), read_held_locks())
    steps = run.metrics.steps
    at = steps[-1] if steps else 0
    of = run.plan.get("steps")
    total = f" of {of:,}" if is_number(of) and of else ""
    how = f" ({row.how})" if row.how and row.how != row.state else ""
    words = [row.state + how, f"step {at:,}{total}"]
    if (layout := _layout_text(run)) is not None:
        words.append(layout)
    model = run.plan.get("model")
    if isinstance(model, str) and model:
        words.append(model)
    if row.started_s:
        words.append(f"started {_clock(row.started_s)}")
    return " · ".join(words)


def _clock(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def _layout_text(run: RunContents) -> str | None:
    try:
        return Layout(**run.plan["layout"]).text()
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _figures(run: RunContents) -> Markup:
    """Return the key figures as tiles."""
    unit, metrics = count_unit(run.plan), run.metrics
    losses, times = metrics.column("loss")[1], metrics.column("step_s")[1]
    rates = metrics.column("tokens_per_s")[1]
    peaks = metrics.column("peak_memory_bytes")[1]
    validated = [e["loss"] for e in run.named("validated") if is_number(e.get("loss"))]
    tiles: list[tuple[str, str]] = []
    if losses:
        tiles.append(("last loss", f"{losses[-1]:.4f}"))
    if validated:
        tiles.append(("last validation", f"{validated[-1]:.4f}"))
        if min(validated) < validated[-1]:
            tiles.append(("best validation", f"{min(validated):.4f}"))
    if len(times):
        tiles.append(("step, median", seconds_text(_median(times))))
    if len(rates) and unit == "tokens":
        tiles.append((f"{unit}/s, median", count_text(_median(rates))))
    total = metrics.running_sum("tokens")
    if total and total[-1] > 0:
        tiles.append((unit if unit == "tokens" else "targets", count_text(total[-1])))
    if len(peaks):
        tiles.append(("peak memory, rank 0", bytes_text(max(peaks))))
    if is_number(parameters := run.plan.get("parameters")) and parameters:
        tiles.append(("parameters", count_text(parameters)))
    if is_number(batch := run.plan.get("batch")) and batch:
        tiles.append(("samples per step", f"{batch:,}"))
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", text)) for name, text in tiles], class_="tiles"
    )


def _median(values: Sequence[float]) -> float:
    newest = values[-10_000:]
    return statistics.median(newest[1:] if len(newest) > 1 else newest)
