"""Sentences on the best run: by loss at equal tokens and time, or by speed if losses are equal."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.base.text.units import seconds_text
from shoal.report.comparison.compared_runs import ComparisonRun
from shoal.report.comparison.key_differences import join_names
from shoal.report.comparison.loss_differences import first_difference_text
from shoal.report.comparison.run_comparison import Comparison, EqualPoint

PACELESS_KEYS = (
    "optimizer.lr", "optimizer.betas", "optimizer.weight_decay", "optimizer.clip",
    "optimizer.schedule", "optimizer.warmup_steps", "train.seed", "train.steps", "run.",
)  # fmt: skip
"""Beginnings of keys that leave the seconds of a step as they are."""
COMPARABLE = ("data.source", "data.tokenizer", "data.validation", "model.loss", "data.packing")
"""Keys that change what a loss is a mean of."""
FEW_KEYS, FEW_TIMES = 3, 4
"""Keys whose values a sentence has · runs whose times, or values, it has."""
LEAST_SPEEDUP = 1.03
"""Ratio of the seconds of a step from which a run is called faster."""


def loss_text(loss: float) -> str:
    """Return a loss as a text with four digits.

    >>> loss_text(5.06054), loss_text(1e7)
    ('5.0605', '1e+07')
    """
    return f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.4g}"


def best_run_text(found: Comparison) -> str:
    """Return the best run in one sentence: by loss, or by speed if all losses are equal.

    The validation stands first, then the losses at equal tokens and at equal time, then the keys
    that differ. Equal time counts only if a key that differs can change the pace.
    """
    if found.has_equal_losses and (speed := _speed_text(found)):
        return speed
    shared = [point for point in found.points if point.is_shared and point.winners]
    if len(found.runs) < 2:
        return "A single run is left"
    if not shared:
        return f"The runs have no amount of {found.runs[0].unit} or time in common"
    if all(one.key.startswith(PACELESS_KEYS) for one in found.keys):
        shared = [point for point in shared if point.kind != "time"] or shared
    point = shared[0]
    headline = _validation_text(found)
    text = _point_text(found, point)
    if headline:
        alone = f"{found.runs[point.winners[0]].label} has the lowest loss "
        is_same = headline.startswith(alone.replace("loss", "validation loss").rstrip())
        text = f"{headline}; {text.replace(alone, 'in training ', 1) if is_same else text}"
    for other in shared[1:]:
        if other.winners == point.winners and len(point.winners) < len(other.ranking):
            text += f"; after {other.text()}, too: {_loss_words(found, other)}"
        else:
            words = _point_text(found, other)
            text += f"; {words[:1].lower() + words[1:] if _is_tie_of_all(other) else words}"
        if other.kind == "time":
            text += _pace_text(found)
    return f"{text}{_cause_text(found)}"


def _pace_text(found: Comparison) -> str:
    """Return the seconds of a step of each run of a few, in brackets; "" if one is unknown."""
    times_s = [run.step_s for run in found.runs if run.step_s]
    if len(times_s) < len(found.runs) or len(times_s) > FEW_TIMES:
        return ""
    steps = ", ".join(f"{run.label} {seconds_text(run.step_s or 0.0)}" for run in found.runs)
    return f" (a step: {steps})"


def _validation_text(found: Comparison) -> str:
    """Return the run with the lowest last validation loss, and its distance from the next one.

    "" if a run has none, or if a key differs that makes validations another task.
    """
    losses = [
        (run.validation, at) for at, run in enumerate(found.runs) if run.validation is not None
    ]
    if len(losses) < len(found.runs) or any(one.key in COMPARABLE for one in found.keys):
        return ""
    (least, best), (next_least, second) = sorted(losses)[:2]
    if least == next_least:
        return ""
    steps = [f" (step {found.runs[at].row.step:,})" for at in (best, second)]
    if len({run.row.step for run in found.runs}) == 1:
        steps = ["", ""]
    gap = f"{next_least - least:.2g} below {found.runs[second].label}{steps[1]}"
    name = found.runs[best].label
    return f"{name} has the lowest validation loss: {loss_text(least)}{steps[0]}, {gap}"


def _cause_text(found: Comparison) -> str:
    """Return the keys that change the result and differ: with their values if there are few."""
    changing = [one for one in found.keys if one.changes]
    if not changing:
        return ""
    if len(changing) > FEW_KEYS or len(found.runs) > FEW_TIMES:
        return f"; {len(changing)} keys that change the result differ"
    words = (f"{one.key} ({', '.join(one.values)})" for one in changing)
    return f"; what differs: {join_names(list(words))}"


def _speed_text(found: Comparison) -> str:
    """Return the fastest of runs with equal losses; empty if fewer than two have times."""
    times = sorted((run.step_s, at) for at, run in enumerate(found.runs) if run.step_s)
    if len(times) < 2 or len(times) < len(found.runs):
        return ""
    (least_s, fastest), (most_s, slowest) = times[0], times[-1]
    names = found.runs[fastest].label, found.runs[slowest].label
    seconds = _seconds_words(least_s or 0.0, most_s or 0.0)
    ratio = (most_s or 0.0) / (least_s or 1.0)
    if ratio < LEAST_SPEEDUP:
        return f"{_all_runs(len(times))} are equal in every loss, and equally fast ({seconds})"
    than = "" if len(times) == 2 else f" than {names[1]}"
    return f"{names[0]}: equal in every loss, and {ratio:.3g} times faster{than} ({seconds})"


def _seconds_words(least_s: float, most_s: float) -> str:
    """Return two times of a step, the unit once where it is the same.

    >>> _seconds_words(0.1831, 0.3158), _seconds_words(0.5, 2.0)
    ('183.1 against 315.8 ms a step', '500.0 ms against 2.0 s a step')
    """
    least, most = seconds_text(least_s), seconds_text(most_s)
    number, _, unit = least.partition(" ")
    if most.partition(" ")[2] == unit and " " not in unit:
        least = number
    return f"{least} against {most} a step"


def _all_runs(count: int) -> str:
    return "Both runs" if count == 2 else f"All {count} runs"


def _is_tie_of_all(point: EqualPoint) -> bool:
    return len(point.winners) == len(point.losses)


def _point_text(found: Comparison, point: EqualPoint) -> str:
    """Return the runs with the least loss at an amount."""
    if _is_tie_of_all(point):
        count = len(point.winners)
        return f"{_all_runs(count)} have the same loss after {point.text()}: {_least(point)}"
    names = join_names([found.runs[at].label for at in point.winners])
    verb = "has" if len(point.winners) == 1 else "have"
    return f"{names} {verb} the lowest loss after {point.text()}: {_loss_words(found, point)}"


def _least(point: EqualPoint) -> str:
    return loss_text(point.losses[point.winners[0]] or 0.0)


def _loss_words(found: Comparison, point: EqualPoint) -> str:
    """Return the least loss, and its distance from the next one."""
    best, rest = point.winners[0], point.ranking[len(point.winners) :]
    if not rest:
        return _least(point)
    least, next_least = point.losses[best] or 0.0, point.losses[rest[0]] or 0.0
    name = found.runs[rest[0]].label
    if point.is_within_noise(best, rest[0]):
        return f"{_least(point)}, within the noise of {name}"
    return f"{_least(point)}, {next_least - least:.2g} below {name}"


def covered_text(runs: Sequence[ComparisonRun]) -> str:
    """Return the runs whose loss curves another run's curve covers; empty: none."""
    groups: list[list[ComparisonRun]] = []
    for run in runs:
        group = next(
            (one for one in groups if first_difference_text(one[0].series, run.series) == "equal"),
            None,
        )
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    texts = []
    for group in groups:
        names = [run.label for run in group]
        if len(names) > 1:
            verb = "lies" if len(names) == 2 else "lie"
            texts.append(f"{join_names(names[:-1])} {verb} under {names[-1]}")
    return f"Equal losses cover each other: {'; '.join(texts)}." if texts else ""
