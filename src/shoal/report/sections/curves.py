"""Curves of a run over steps, and its spikes with what was in each step."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.base.runlog.damaged_lines import Record, is_number
from shoal.base.text.event_sentences import event_text, numbers_text
from shoal.report.markup import Markup, clean_text, table, tag
from shoal.report.metric_series import SampledSeries, sample_knots, sample_series
from shoal.report.run_contents import RunContents
from shoal.report.run_starts import list_starts
from shoal.report.sections.statistic_ranges import TITLES, read_statistic_ranges
from shoal.report.svg_charts import byte_label, line_chart, number_label, sampled_lines
from shoal.view.progress import count_unit

MOST_SOURCES = 12
SHOWN_STARTS = 3
"""Resumes whose lines in a chart have a name."""
SHOWN_SPIKES, MOST_CULPRITS = 40, 8


@dataclass(frozen=True)
class CurveSeries:
    """One line of a chart.

    Attributes:
        label: in the legend.
        run: index of its run, whose tokens and seconds may stand below it.
        points: sampled.
    """

    label: str
    run: int
    points: SampledSeries


@dataclass(frozen=True)
class Curve:
    """One chart: its title with the unit, and a series per line.

    Attributes:
        key: names it in the page.
        series: of each run or source that has points.
        form: "number" or "bytes", of the y axis.
    """

    key: str
    title: str
    series: tuple[CurveSeries, ...]
    form: str = "number"


LABELS: dict[str, Callable[[float], str]] = {"number": number_label, "bytes": byte_label}


def list_curves(runs: Sequence[RunContents]) -> list[Curve]:
    """Return the charts of one run or several; a series per run, or per source of data."""
    unit = count_unit(runs[0].plan) if runs else "tokens"
    columns = [
        ("loss", "training loss", "number"),
        ("lr", "learning rate", "number"),
        ("grad_norm", "gradient norm, before clipping", "number"),
        ("tokens_per_s", f"{'tokens' if unit == 'tokens' else 'targets'} per second", "number"),
        ("step_s", "time of a step, s", "number"),
        ("peak_memory_bytes", "peak memory of rank 0", "bytes"),
        ("mfu", "model FLOP utilisation", "number"),
    ]
    own = dict.fromkeys(
        name for run in runs for name in run.metrics.columns if name.startswith("metrics.")
    )
    columns += [(name, name.removeprefix("metrics."), "number") for name in own]
    curves = []
    for name, title, form in columns:
        series = [CurveSeries(run.label, at, run.sample(name)) for at, run in enumerate(runs)]
        curves.append(Curve(name, title, _with_points(series), form))
    curves[1:1] = [
        Curve("validation", "validation loss", _validation_series(runs)),
        Curve("sources", "validation loss by source", _source_series(runs)),
    ]
    curves.append(Curve("waits", "waits of rank 0, s", _wait_series(runs)))
    curves += _statistic_curves(runs)
    return [curve for curve in curves if curve.series]


def _statistic_curves(runs: Sequence[RunContents]) -> list[Curve]:
    """Return the ranges of tensor statistics, for runs that recorded any."""
    found: dict[str, list[CurveSeries]] = {key: [] for key in TITLES}
    for at, run in enumerate(runs):
        head = "" if len(runs) == 1 else f"{run.label}: "
        for one in read_statistic_ranges(run.folder):
            for line, values in one.values.items():
                points = run.reduce(one.steps, values)
                found[one.key].append(CurveSeries(f"{head}{line}", at, points))
    return [Curve(key, TITLES[key], tuple(series)) for key, series in found.items()]


def _wait_series(runs: Sequence[RunContents]) -> tuple[CurveSeries, ...]:
    """Return the waits of rank 0 for runs that recorded no times by rank."""
    found = []
    for at, run in enumerate(runs):
        if run.rank_times is None:
            head = "" if len(runs) == 1 else f"{run.label}: "
            for word, name in (("communication", "comm_exposed_s"), ("data", "data_wait_s")):
                found.append(CurveSeries(f"{head}{word}", at, run.sample(name)))
    return _with_points(found)


def _with_points(series: Sequence[CurveSeries]) -> tuple[CurveSeries, ...]:
    return tuple(one for one in series if one.points.count)


def _validation_series(runs: Sequence[RunContents]) -> tuple[CurveSeries, ...]:
    points = [_points(run.named("validated"), _loss_of) for run in runs]
    series = [CurveSeries(run.label, at, points[at]) for at, run in enumerate(runs)]
    return _with_points(series)


def _source_series(runs: Sequence[RunContents]) -> tuple[CurveSeries, ...]:
    found = []
    has_owners = False
    for at, run in enumerate(runs):
        events = run.named("validated")
        if any(event.get("worst") for event in events):  # islands all report all owners
            if has_owners:
                continue
            has_owners = True
        names = dict.fromkeys(
            name for e in events if isinstance(e.get("by_source"), dict) for name in e["by_source"]
        )
        for name in list(names)[:MOST_SOURCES]:
            points = _points(events, partial(_loss_of_source, name))
            label = name if len(runs) == 1 else f"{run.label}: {name}"
            found.append(CurveSeries(clean_text(label), at, points))
    return _with_points(found)


def _loss_of(event: Record) -> Any:
    return event.get("loss")


def _loss_of_source(name: str, event: Record) -> Any:
    sources = event.get("by_source")
    row = sources.get(name) if isinstance(sources, dict) else None
    return row.get("loss") if isinstance(row, dict) else None


def _points(events: Sequence[Record], value_of: Callable[[Record], Any]) -> SampledSeries:
    """Return the values of events over their steps; a repeated step counts once, its last value."""
    found = {}
    for event in events:
        step, value = event.get("step"), value_of(event)
        if is_number(step) and is_number(value) and 0 <= step < 1 << 53:
            found[int(step)] = float(value)
    steps = sorted(found)
    return sample_series(steps, [found[step] for step in steps])


def curves_section(run: RunContents) -> Markup:
    """Return the charts of a run; a script of the page replaces each by one that zooms."""
    curves = list_curves(run.curve_runs)
    charts = [(_values if is_single(curve) else _chart)(curve, run) for curve in curves]
    if not charts:
        return tag("section", tag("h2", "Curves"), tag("p", "No step was recorded yet."))
    controls = tag("div", id="controls", hidden="hidden")
    return tag(
        "section", [tag("h2", "Curves"), controls, tag("div", charts, class_="grid2")], id="curves"
    )


def _chart(curve: Curve, run: RunContents) -> Markup:
    lines = [line for one in curve.series for line in sampled_lines(one.label, one.points)]
    marks = run.marked_steps if curve.key in ("loss", "grad_norm") else ()
    drawn = line_chart(
        curve.title,
        lines,
        x_title="step",
        y_label=LABELS[curve.form],
        marks=marks,
        starts=start_marks(run),
    )
    return tag("div", drawn, class_="curve", data_curve=curve.key)


def is_single(curve: Curve) -> bool:
    """Return whether no line of a chart has a second point, so that a number says as much."""
    return all(one.points.count == 1 for one in curve.series)


def _values(curve: Curve, run: RunContents) -> Markup:
    """Return the single values of a chart's lines as text."""
    rows = []
    for one in curve.series:
        step, value = one.points.steps[0], one.points.values[0]
        text = byte_label(value) if curve.form == "bytes" else f"{value:.5g}"
        name = f"{one.label}: " if len(curve.series) > 1 else ""
        rows.append(tag("p", name, tag("b", text), f" at step {step:,}, the only value"))
    return tag("div", tag("figure", tag("figcaption", curve.title), rows), class_="single")


def start_marks(run: RunContents) -> list[tuple[int, str]]:
    """Return the steps from which a run resumed, with the name of the newest ones."""
    steps = sorted({start.step for start in list_starts(run.events) if start.step})
    newest = steps[-SHOWN_STARTS:]
    return [(step, f"resumed, step {step:,}" if step in newest else "") for step in steps[-64:]]


def curve_data(runs: Sequence[RunContents]) -> Record:
    """Return the charts as JSON for the page's script."""
    return {
        "curves": curve_records(list_curves(runs)),
        "knots": [shorten_knots(sample_knots(run.metrics)) for run in runs],
        "marks": [run.marked_steps for run in runs],
        "starts": [start_marks(run) for run in runs],
    }


def curve_records(curves: Sequence[Curve]) -> list[Record]:
    """Return charts as JSON."""
    return [
        {
            "key": clean_text(curve.key),
            "title": clean_text(curve.title),
            "form": curve.form,
            "series": [
                {
                    "label": clean_text(one.label),
                    "run": one.run,
                    "x": list(one.points.steps),
                    "y": [_short(value) for value in one.points.values],
                    "mx": list(one.points.mean_steps),
                    "my": [_short(value) for value in one.points.means],
                }
                for one in curve.series
            ],
        }
        for curve in curves
    ]


def shorten_knots(knots: Sequence[tuple[int, float, float]]) -> list[list[float]]:
    """Return knots as JSON: step, tokens and seconds so far."""
    return [[step, _short(tokens), _short(seconds)] for step, tokens, seconds in knots]


def _short(value: float) -> float | int:
    """Return a number with seven digits, which JSON writes short."""
    found = float(f"{value:.7g}")
    return int(found) if found == int(found) and abs(found) < 1e15 else found


def spikes_section(run: RunContents) -> Markup:
    """Return a table of the steps with a spike, a skip or a rewind, and what was in each."""
    events = run.named("spike", "step_skipped", "rewound")
    if not events:
        return Markup("")
    rows = []
    for event in events[-SHOWN_SPIKES:]:
        step = event.get("step")
        at = int(step) if is_number(step) else -1
        row = run.metrics.marked.get(at, {})
        before = run.metrics.marked.get(at - 1, {})
        after = run.metrics.marked.get(at + 1, {})
        samples = row.get("samples")
        span = (
            f"{samples[0]:,} – {samples[1] - 1:,}"
            if isinstance(samples, list) and len(samples) == 2 and all(map(is_number, samples))
            else "–"
        )
        rows.append(
            [
                f"{at:,}" if at >= 0 else "–",
                str(event["event"]).replace("_", " "),
                *(_cell(one.get("loss")) for one in (before, row, after)),
                _cell(row.get("grad_norm")),
                _cell(row.get("lr")),
                span,
                _culprits(event),
                str(event.get("reason") or event_text(event) or ""),
            ]
        )
    head = [
        "step", "event", "loss before", "loss", "loss after", "gradient norm", "learning rate",
        "samples", "where", "reason",
    ]  # fmt: skip
    more = len(events) - len(rows)
    note = tag("p", f"{more} earlier ones are not shown.", class_="note") if more > 0 else None
    step = next((event["step"] for event in reversed(events) if is_number(event.get("step"))), 1)
    command = tag("code", f"shoal data look {shlex.quote(str(run.folder))} --step {int(step)}")
    return tag(
        "section",
        [
            tag("h2", "Spikes and skipped steps"),
            table(head, rows, numeric="n nnnnnnww"),
            note,
            tag("p", "The samples of a step: ", command),
        ],
        id="spikes",
    )


def _cell(value: object) -> str:
    return f"{value:.4g}" if is_number(value) else "–"


def _culprits(event: Record) -> str:
    """Return the ranks, micro-batches and samples that an event names."""
    found = event.get("culprits")
    texts = []
    for one in found[:MOST_CULPRITS] if isinstance(found, list) else [event]:
        if isinstance(one, dict) and is_number(one.get("rank")):
            words = [f"rank {one['rank']}"]
            for key in ("micro_batches", "samples"):
                if one.get(key):
                    words.append(f"{key.replace('_b', '-b')} {numbers_text(one[key])}")
            texts.append(" ".join(words))
    return "; ".join(texts) or "–"
