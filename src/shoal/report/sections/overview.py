"""First section: the verdict in one sentence, then the key figures of the run."""

from __future__ import annotations

import time
from typing import Any

from shoal.base.layouts.layout import Layout
from shoal.base.runlog.damaged_lines import is_number
from shoal.base.text.units import bytes_text, count_text, seconds_text
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.owner_figures import BITS, read_owner_validation
from shoal.report.run_contents import RunContents
from shoal.report.run_starts import list_starts
from shoal.report.sections.measured_costs import median_name, median_of, median_rate
from shoal.report.verdict.run_verdict import Verdict, find_verdict
from shoal.view.diagnose import read_continuation
from shoal.view.progress import count_unit
from shoal.view.run_table import RunRow, read_held_locks, read_row

Record = dict[str, Any]
SHARES = ("samples", "steps", "weight")
"""Numbers of each owner in the event of a round."""
LOW_GOODPUT = 0.5
"""Share of the sessions' time in steps below which the verdict mentions it."""


def overview_section(run: RunContents) -> Markup:
    """Return the verdict and the key figures."""
    verdict = find_verdict(run.folder)
    row = read_row(run.folder, run.folder, time.time(), read_held_locks())
    return tag(
        "section",
        [
            tag("p", "Shoal report", class_="kicker"),
            tag("h1", run.label),
            tag("p", _state_text(run, row, verdict), class_="lead"),
            tag("p", _starts_text(run), class_="lead"),
            _verdict_box(verdict, run),
            _continuation_line(run),
            _islands_text(run),
            _figures(run),
            _owners_table(run),
            _owner_shares_table(run),
        ],
        id="verdict",
    )


def _owners_table(run: RunContents) -> Child:
    """Return the last validation of every data owner, the worst first; None without owners.

    Owners of text compare by bits per byte: a loss per token depends on the tokenizer.
    """
    found = read_owner_validation(run)
    if found is None:
        return None
    rows = found.rows
    text = f"Validation of each owner at step {found.event.get('step')}, the worst first"
    heads = ["owner", "loss", "accuracy", "targets"]
    cells = [[name, *_owner_cells(row)] for name, row in rows]
    if found.in_bytes:
        text += ", by bits per byte of text"
        heads.insert(1, "bits per byte")
        for line, (_, row) in zip(cells, rows, strict=True):
            line.insert(1, f"{row[BITS]:.4f}" if is_number(row.get(BITS)) else "–")
    return table(heads, cells, numeric=" " + "n" * (len(heads) - 1), caption=text)


def _owner_shares_table(run: RunContents) -> Child:
    """Return how much each data owner's samples counted in the merges; None without owners."""
    sums: dict[str, list[float]] = {}
    rounds = 0
    for event in run.curve_runs[0].named("round_committed"):
        by_owner = event.get("by_owner")
        if not isinstance(by_owner, dict) or not by_owner:
            continue
        rounds += 1
        for name, row in by_owner.items():
            if not isinstance(row, dict):
                continue
            values = [float(row[key]) for key in SHARES if is_number(row.get(key))]
            if len(values) == len(SHARES):
                samples, steps, weight = values
                old = sums.setdefault(str(name), [0.0, 0.0, 0.0, 0.0])
                sums[str(name)] = [samples, old[1] + 1, old[2] + steps, old[3] + weight]
    if not sums:
        return None
    cells = [
        [name, f"{samples:,.0f}", f"{trained:,.0f}", f"{steps:,.0f}", f"{weight / rounds:.1%}"]
        for name, (samples, trained, steps, weight) in sorted(
            sums.items(), key=lambda one: -one[1][3]
        )
    ]
    text = f"Share of each owner in the {rounds:,} merges, the largest weight first"
    heads = ["owner", "samples", "rounds", "steps", "mean weight"]
    return table(heads, cells, numeric=" nnnn", caption=text)


def _owner_cells(row: Record) -> list[str]:
    loss, accuracy, targets = (row.get(key) for key in ("loss", "accuracy", "targets"))
    return [
        f"{loss:.4f}" if is_number(loss) else "–",
        f"{accuracy:.1%}" if is_number(accuracy) else "–",
        count_text(targets) if is_number(targets) else "–",
    ]


def _islands_text(run: RunContents) -> Child:
    """Return the islands of a run, each of which has a folder and a report of its own."""
    if not run.islands:
        return None
    names = ", ".join(island.label for island in run.islands)
    text = f"A run of islands: {names}. Each has ranks, times and a verdict of its own: "
    return tag("p", text, tag("code", f"shoal report {run.folder / run.islands[0].label}"))


def _continuation_line(run: RunContents) -> Child:
    """Return where a run goes on that ended before it was done, and with which command."""
    found = read_continuation(run.folder)
    if found is None:
        return None
    saved = "No complete checkpoint is in this folder"
    if found.saved_step is not None:
        saved = f"Newest checkpoint: step {found.saved_step:,}"
    text = f"{saved}; {found.lost}. "
    if not found.command.startswith("shoal "):
        return tag("p", text, found.command, class_="resume")
    return tag("p", text, "Go on: ", tag("code", found.command), class_="resume")


def _count(steps: int) -> str:
    return f"{steps:,} step{'s' if steps != 1 else ''}"


def _low_goodput_line(run: RunContents, verdict: Verdict) -> Child:
    """Return a sentence beside "nothing to gain" for a run that spent its time outside of steps."""
    found = run.goodput
    if verdict.kind != "nothing" or verdict.step_s is None or found.session_s <= 0:
        return None
    if found.session_share >= LOW_GOODPUT:
        return None
    return tag("p", f"But only {found.text()}.", class_="caveat")


def _verdict_box(verdict: Verdict, run: RunContents) -> Markup:
    known = verdict.step_s is not None
    if run.islands and verdict.kind == "nothing" and not known:
        text = "Verdicts on the steps are in the report of each island"
        return tag("div", tag("p", text, class_="headline"), class_="verdict")
    look = {"fault": "bad", "nothing": "good" if known else ""}.get(verdict.kind, "warn")
    headline, _, cure = verdict.line().partition("; try: ")
    parts: list[Child] = [
        tag("p", headline[:1].upper() + headline[1:], class_="headline"),
        tag("p", "Try ", tag("code", cure), class_="cure") if cure else None,
    ]
    if verdict.share is not None and verdict.step_s and verdict.without_s is not None:
        parts.append(_saving_bar(verdict.step_s, verdict.without_s))
    parts.insert(1, _low_goodput_line(run, verdict))
    parts += [tag("p", sentence, class_="evidence") for sentence in verdict.evidence]
    if verdict.steps:
        text = f"Times of a step here: mean of {_count(verdict.steps)}, the newest after warm-up."
        parts.append(tag("p", text, class_="evidence"))
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


def _state_text(run: RunContents, row: RunRow, verdict: Verdict) -> str:
    """Return state, step, layout and model; a cause that the verdict names stands only there."""
    # Owners take unequal numbers of steps: the island with the most shows how far the run is.
    at = max((one.metrics.steps[-1] for one in run.curve_runs if one.metrics.steps), default=0)
    of = run.plan.get("steps") if not run.islands else row.steps
    total = f" of {of:,}" if is_number(of) and of else ""
    is_new = row.how and row.how != row.state and row.how not in verdict.line()
    how = f" ({row.how})" if is_new else ""
    words = [row.state + how, f"step {at:,}{total}"]
    if (layout := _layout_text(run)) is not None:
        words.append(layout)
    model = run.plan.get("model")
    if isinstance(model, str) and model:
        words.append(model)
    return " · ".join(words)


def _starts_text(run: RunContents) -> str:
    """Return the first start, the last one, and the numbers of starts and deaths."""
    starts = list_starts(run.events)
    if not starts:
        return ""
    words = [f"started {_clock(starts[0].time_s)}"]
    if len(starts) > 1 or starts[-1].step is not None:
        last = starts[-1]
        at = "" if len(starts) == 1 else f" {_clock(last.time_s)}"
        whence = f"resumed{at} from step {last.step:,}" if last.step is not None else ""
        words.append(whence or f"last started{at} from the beginning")
    counted = sum(run.event_counts.get(name, 0) for name in ("run_started", "restarting"))
    count = max(len(starts), counted)
    words.append(f"{count:,} start{'s' if count > 1 else ''}")
    if deaths := run.event_counts.get("worker_died", 0):
        words.append(f"{deaths:,} death{'s' if deaths > 1 else ''} of a rank")
    return " · ".join(words)


def _clock(time_s: float | None) -> str:
    try:
        if time_s is None:
            return "at an unknown time"
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
    losses = metrics.column("loss")[1]
    peaks = metrics.column("peak_memory_bytes")[1]
    validated = [e["loss"] for e in run.named("validated") if is_number(e.get("loss"))]
    tiles: list[tuple[str, str]] = []
    if losses:
        tiles.append(("last loss", f"{losses[-1]:.4f}"))
    if validated:
        tiles.append(("last validation", f"{validated[-1]:.4f}"))
        if min(validated) < validated[-1]:
            tiles.append(("best validation", f"{min(validated):.4f}"))
    if (step_s := median_of(run, "step_s")) is not None:
        tiles.append((f"step, {median_name(run)}", seconds_text(step_s)))
    if (rate := median_rate(run)) is not None:
        tiles.append((f"{unit}/s, median", count_text(rate)))
    total = metrics.running_sum("tokens")
    if total and total[-1] > 0:
        tiles.append((unit if unit == "tokens" else "targets", count_text(total[-1])))
    if len(peaks):
        tiles.append(("peak memory of rank 0", bytes_text(max(peaks))))
    if is_number(parameters := run.plan.get("parameters")) and parameters:
        tiles.append(("parameters", count_text(parameters)))
    if is_number(batch := run.plan.get("batch")) and batch:
        tiles.append(("samples per step", f"{batch:,}"))
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", text)) for name, text in tiles], class_="tiles"
    )
