"""Sections of a report of several runs, each a function of the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.base.text.units import count_text, seconds_text
from shoal.report.comparison.best_run import (
    COMPARABLE,
    best_run_text,
    covered_text,
    loss_text,
)
from shoal.report.comparison.compared_runs import ComparisonRun
from shoal.report.comparison.key_differences import compared_keys_text
from shoal.report.comparison.loss_differences import (
    LEAST_STEPS,
    WINDOW,
    LossDifference,
    first_difference_text,
    losses_before,
    mean_loss,
)
from shoal.report.comparison.run_comparison import Comparison, EqualPoint
from shoal.report.markup import Child, Markup, table, tag
from shoal.report.sections.curves import LABELS, Curve
from shoal.report.svg_charts import ChartLine, colour_class, line_chart

SHOWN_KEYS, KEY_COLUMNS = 200, 8
"""Keys of the table of keys · of the table of results: those that change the result first."""
OPEN_VERDICTS = 8
"""Runs up to which the verdicts stand before the curves; of more, a press shows them."""


def name_cell(number: int, label: str) -> list[Child]:
    """Return the colour and the name of a run."""
    return [tag("i", class_=f"key {colour_class(number)}"), " ", label]


def header_section(found: Comparison) -> Markup:
    """Return the best run in one sentence, the steps of the differences, and a line per run."""
    count = len(found.runs)
    rows = [
        [name_cell(at, run.label), run.verdict, run.row.state] for at, run in enumerate(found.runs)
    ]
    lines = [tag("p", line, class_="evidence problem") for line in found.problems]
    return tag(
        "section",
        [
            tag("p", "Shoal report", class_="kicker"),
            tag("h1", f"{count} runs" if count > 1 else f"1 run: {found.runs[0].label}"),
            tag("p", f"The baseline is the first run, {found.runs[0].label}.", class_="lead"),
            tag(
                "div",
                [
                    tag("p", best_run_text(found), class_="headline"),
                    tag("p", _capital(found.summary()) + ".", class_="evidence"),
                    tag("p", _keys_text(found), class_="evidence"),
                ],
                class_="verdict",
            ),
            lines,
            tag(
                "details",
                tag("summary", "Verdict on each run"),
                table(("run", "verdict", "state"), rows, numeric=" w"),
                open="open" if count <= OPEN_VERDICTS else None,
            ),
        ],
        id="verdict",
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _keys_text(found: Comparison) -> str:
    changing = [one.key for one in found.keys if one.changes]
    limits_text = compared_keys_text(
        [run.label for run in found.runs], [run.keys for run in found.runs]
    )
    if not changing:
        text = "No key of run.toml that changes the result differs"
        if any(run.keys.settings is None for run in found.runs):
            text = "No recorded key that changes the result differs"
        elif not any(
            one.key in (run.keys.settings or ()) for one in found.keys for run in found.runs
        ):
            text = "No key of run.toml differs"
        more = " Keys that differ are listed below." if found.keys else ""
        return f"{text}{'; ' if limits_text else ''}{limits_text}.{more}"
    more = f" and {len(changing) - 6} more" if len(changing) > 6 else ""
    text = f"Keys that change the result and differ: {', '.join(changing[:6])}{more}."
    if limits := [key for key in changing if key in COMPARABLE]:
        text += f" Losses of another {', '.join(limits)} measure another task."
    return f"{text} {_capital(limits_text)}." if limits_text else text


def curves_section(found: Comparison) -> Markup:
    """Return the legend, the losses as SVG, and frames that the page's script fills."""
    if not found.curves:
        return tag("section", tag("h2", "Curves"), tag("p", "No run has recorded a step."))
    names = [
        tag("span", name_cell(at, run.label), data_run=str(at)) for at, run in enumerate(found.runs)
    ]
    charts = [_chart(curve) for curve in found.curves]
    return tag(
        "section",
        [
            tag("h2", "Curves"),
            tag("div", names, class_="legend", id="runs"),
            tag("p", covered, class_="note") if (covered := covered_text(found.runs)) else None,
            tag("div", id="controls", hidden="hidden"),
            tag("div", charts, class_="grid2"),
        ],
        id="curves",
    )


def _chart(curve: Curve) -> Markup:
    """Return the losses as SVG; for other charts, which need the script, a hidden frame."""
    if curve.key not in ("loss", "validation"):
        figure = tag("figure", tag("figcaption", curve.title))
        return tag("div", figure, class_="curve", data_curve=curve.key, hidden="hidden")
    lines = []
    for one in curve.series:
        steps, values = one.points.mean_steps, one.points.means
        if not values:
            steps, values = one.points.steps, one.points.values
        lines.append(ChartLine(one.label, steps, values, number=one.run))
    drawn = line_chart(curve.title, lines, x_title="step", y_label=LABELS[curve.form])
    return tag("div", drawn, class_="curve", data_curve=curve.key)


def results_section(found: Comparison) -> Markup:
    """Return a row per run: results, then the keys that differ."""
    keys = found.keys[:KEY_COLUMNS]
    unit = found.runs[0].unit if len({run.unit for run in found.runs}) == 1 else "tokens or targets"
    head = [
        "run", "steps", "last loss", f"mean of {WINDOW}", "validation", "best validation",
        unit, "time of steps", "step", f"{unit}/s", *(one.key for one in keys),
    ]  # fmt: skip
    rows = []
    for at, run in enumerate(found.runs):
        results = _result_cells(run)
        values: list[Child] = [one.values[at] for one in keys]
        rows.append([name_cell(at, run.label), *results, *values])
    more = len(found.keys) - len(keys)
    note = f"{more} more keys differ; all are below." if more > 0 else None
    body = table(head, rows, numeric=" " + "n" * (len(head) - 1))
    return tag(
        "section",
        [
            tag("h2", "Results and keys"),
            tag("div", body, class_="sortable"),
            tag("p", note, class_="note") if note else None,
        ],
        id="results",
    )


def _result_cells(run: ComparisonRun) -> list[Child]:
    series = run.series
    tokens = float(series.tokens[-1]) if len(series.tokens) else None
    seconds = float(series.seconds[-1]) if len(series.seconds) else None
    steps = series.steps
    mean = mean_loss(losses_before(series, steps, float(steps[-1]))) if len(steps) else None
    last = next((float(one) for one in series.losses[::-1] if one == one), None)
    return [
        _number(len(steps) or None, lambda count: f"{count:,.0f}"),
        *(_number(one, loss_text) for one in (last, mean, run.validation, run.best_validation)),
        _number(tokens, count_text),
        _number(seconds, seconds_text),
        _number(run.step_s, seconds_text),
        _number(run.rate, count_text),
    ]


def _number(value: float | None, text: Callable[[float], str]) -> Child:
    """Return a number as text; the script sorts by `data-value`."""
    if value is None or value != value or abs(value) == float("inf"):
        return "–"
    return tag("data", text(value), value=f"{value:.17g}")


def differences_section(found: Comparison) -> Markup:
    """Return the steps from which each run differs from the first one."""
    if len(found.runs) < 2:
        return Markup("")
    baseline = found.runs[0].label
    rows = []
    for at, (run, one) in enumerate(zip(found.runs[1:], found.differences, strict=True), 1):
        losses = list(zip((baseline, run.label), one.first_losses or (), strict=False))
        at_step = f"{one.first_step:,}" if one.first_step is not None else "none"
        is_known = one.is_long_enough or one.first_step is None
        separation = "none" if is_known else f"needs {LEAST_STEPS} steps"
        if one.separation_step is not None:
            separation = f"{one.separation_step:,}"
        rows.append(
            [
                name_cell(at, run.label),
                at_step,
                separation,
                _difference_text(one),
                f"{one.common_steps:,}",
                ", ".join(f"{name} {loss!r}" for name, loss in losses) or "–",
            ]
        )
    head = [
        "run", "first different loss", "three spreads from step",
        f"mean difference ± spread, newest {WINDOW}", "common steps",
        "losses there",
    ]  # fmt: skip
    text = (
        f"Each run is compared with {baseline} at the steps that both recorded. Runs are apart "
        f"where the means of {WINDOW} losses differ by more than three spreads for {WINDOW} "
        "steps. The spread is that of such a difference, from the changes of the losses from step "
        "to step."
    )
    return tag(
        "section",
        [
            tag("h2", "Where the losses differ"),
            tag("p", text, class_="note"),
            table(head, rows, numeric=" nnnnn"),
            _pair_table(found.runs),
        ],
        id="differences",
    )


def _difference_text(one: LossDifference) -> str:
    """Return the mean difference of the newest losses with its spread."""
    if one.is_equal:
        return "identical"
    if one.newest_mean is None:
        return "–"
    spread = f" ± {one.newest_spread:.2g}" if one.newest_spread is not None else ""
    return f"{one.newest_mean:+.3g}{spread}"


def _pair_table(runs: Sequence[ComparisonRun]) -> Child:
    """Return the first different step of each pair of runs; none for two runs."""
    if len(runs) < 3:
        return None
    head: list[Child] = ["", *(name_cell(at, run.label) for at, run in enumerate(runs))]
    rows: list[list[Child]] = [
        [name_cell(at, run.label), *("·" for _ in runs)] for at, run in enumerate(runs)
    ]
    for at, run in enumerate(runs):
        for other in range(at + 1, len(runs)):
            one = first_difference_text(run.series, runs[other].series)
            rows[at][other + 1] = rows[other][at + 1] = one
    summary = tag("summary", "First different loss of each pair of runs")
    return tag("details", summary, table(head, rows, numeric=" " + "n" * len(runs)))


def equal_points_section(found: Comparison) -> Markup:
    """Return the losses of all runs at equal tokens, or targets, and at equal time."""
    units = {run.unit for run in found.runs}
    unit = "tokens" if len(units) > 1 else found.runs[0].unit
    parts: list[Child] = [tag("h2", f"Loss at equal {unit} and at equal time")]
    if len(units) > 1:
        text = f"The runs count {' and '.join(sorted(units))}: no equal amount of them."
        parts.append(tag("p", text, class_="note"))
    for kind in dict.fromkeys(point.kind for point in found.points):
        points = [point for point in found.points if point.kind == kind]
        head: list[Child] = ["run"]
        head += [
            [point.text(), [tag("br"), "(the shortest run)"] if point.is_shared else None]
            for point in points
        ]
        rows = [
            [name_cell(at, run.label), *(_loss_cell(point, at) for point in points)]
            for at, run in enumerate(found.runs)
        ]
        caption = f"at equal {'time of steps' if kind == 'time' else kind}"
        parts.append(table(head, rows, numeric=" " + "n" * len(points), caption=caption))
    parts.append(
        tag(
            "p",
            f"Means of {WINDOW} steps. “–”: the run did not get so far. Bold: the least "
            "loss, of all runs that tie; none where only one run got so far. "
            "Runs below a tenth of the longest are not the shortest.",
            class_="note",
        )
    )
    late = [run.label for run in found.runs if len(run.series.steps) and run.series.steps[0] > 1]
    if late:
        text = f"Records of {', '.join(late)} begin after step 1: amounts count from there."
        parts.append(tag("p", text, class_="note"))
    return tag("section", parts, id="equal") if found.points else Markup("")


def _loss_cell(point: EqualPoint, at: int) -> Child:
    loss = point.losses[at]
    if loss is None:
        return "–"
    return tag("b", loss_text(loss)) if at in point.winners else loss_text(loss)


def keys_section(found: Comparison) -> Markup:
    """Return the keys that differ, with the value of each run."""
    parts: list[Child] = [tag("h2", "Keys that differ")]
    bare = [run.label for run in found.runs if run.keys.settings is None]
    if not found.keys:
        parts.append(tag("p", _keys_text(found)))
    else:
        head: list[Child] = ["key", "changes the result"]
        head += [name_cell(at, run.label) for at, run in enumerate(found.runs)]
        rows = [
            [tag("code", one.key), "yes" if one.changes else "no", *one.values]
            for one in found.keys[:SHOWN_KEYS]
        ]
        parts.append(tag("div", table(head, rows), class_="sortable"))
    if (more := len(found.keys) - SHOWN_KEYS) > 0:
        parts.append(tag("p", f"{more:,} more keys differ and are not shown.", class_="note"))
    if bare:
        text = f"No run.toml that can be read: {', '.join(bare)}."
        parts.append(tag("p", text, class_="note"))
    return tag("section", parts, id="keys")
