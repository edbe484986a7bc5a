"""Ranges of a run's tensor statistics: largest, median and least over parameters or blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from shoal.base.runlog.damaged_lines import is_number
from shoal.report.markup import Child, Markup, clean_text, table, tag
from shoal.report.run_contents import RunContents, iter_records

STATISTICS_FILE = "statistics.jsonl"
TITLES = {
    "gradient_norm": "gradient norm of a parameter, before clipping",
    "weight_norm": "weight norm of a parameter",
    "update_ratio": "update ÷ weight of a parameter",
    "activation_rms": "root mean square of a block's outputs",
    "activation_largest": "largest value of a block's outputs",
}
LINES = ("largest", "median", "least")
MOST_NAMES = 100_000


@dataclass
class StatisticRange:
    """Range of one statistic over steps, and the newest values by name.

    Attributes:
        key: of a line of statistics.jsonl.
        steps: ascending.
        values: of each of `LINES`, by step.
        newest: value by parameter or block at the last step.
    """

    key: str
    steps: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {one: [] for one in LINES})
    newest: dict[str, float] = field(default_factory=dict)


def read_statistic_ranges(folder: Path) -> list[StatisticRange]:
    """Return the ranges of each statistic that a run recorded; for a repeated step the first."""
    path = folder / STATISTICS_FILE
    found = {key: StatisticRange(key) for key in TITLES}
    for record in iter_records(path) if path.exists() else ():
        for key, one in found.items():
            step, values = record.get("step"), dict(_numbers(record.get(key)))
            if not values or not is_number(step) or not 0 <= step < 1 << 53:
                continue
            if one.steps and step <= one.steps[-1]:
                continue
            one.steps.append(int(step))
            numbers = list(values.values())
            for line, value in zip(
                LINES, (max(numbers), median(numbers), min(numbers)), strict=True
            ):
                one.values[line].append(value)
            one.newest = values
    return [one for one in found.values() if one.steps]


def _numbers(found: object) -> Iterator[tuple[str, float]]:
    if isinstance(found, dict) and len(found) <= MOST_NAMES:
        for name, value in found.items():
            if is_number(value) and abs(value) < 1e300:
                yield str(name), float(value)


def statistics_section(run: RunContents) -> Markup:
    """Return a table of the newest statistics, with the names of the extremes; "" without any."""
    ranges = read_statistic_ranges(run.folder)
    if not ranges:
        return Markup("")
    rows: list[Sequence[Child]] = []
    for one in ranges:
        most, least = (pick(one.newest, key=one.newest.__getitem__) for pick in (max, min))
        middle = median(one.newest.values())
        rows.append(
            [
                TITLES[one.key],
                f"{one.steps[-1]:,}",
                f"{one.newest[most]:.4g}",
                clean_text(most),
                f"{middle:.4g}",
                f"{one.newest[least]:.4g}",
                clean_text(least),
            ]
        )
    head = ("statistic", "step", "largest", "of", "median", "least", "of")
    parts: list[Child] = [tag("h2", "Statistics of tensors"), table(head, rows, numeric=" nn nn ")]
    return tag("section", parts, id="statistics")
