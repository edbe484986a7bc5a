"""Sentences on the best run: by loss at equal tokens and time, or by speed if losses are equal."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.base.text.units import seconds_text
from shoal.report.comparison.compared_runs import ComparisonRun
from shoal.report.comparison.key_differences import join_names
from shoal.report.comparison.loss_differences import first_difference_text
from shoal.report.comparison.run_comparison import Comparison, EqualPoint

LEAST_SPEEDUP = 1.03
"""Ratio of the seconds of a step from which a run is called faster."""


def loss_text(loss: float) -> str:
    """Return a loss as a text with four digits.

    >>> loss_text(5.06054), loss_text(1e7)
    ('5.0605', '1e+07')
    """
    return f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.4g}"


def best_run_text(found: Comparison) -> str:
    """Return the best run in one sentence: by loss, or by speed if all losses are equal."""
    if found.has_equal_losses and (speed := _speed_text(found)):
        return speed
    shared = [point for point in found.points if point.is_shared and point.winners]
    if len(found.runs) < 2:
        return "A single run is left"
    if not shared:
        return "The runs have no amount of tokens or time in common"
    point = shared[0]
    text = _point_text(found, point)
    for other in shared[1:]:
        if other.winners == point.winners and len(point.winners) < len(other.ranking):
            text += f"; after {other.text()}, too: {_loss_words(found, other)}"
        else:
            words = _point_text(found, other)
            text += f"; {words[:1].lower() + words[1:] if _is_tie_of_all(other) else words}"
    return text


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
