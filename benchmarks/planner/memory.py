"""Predicted against measured peak memory of published runs, group by group, each left out of fits.

    python benchmarks/planner/memory.py [--json FILE]

Two constants are fitted, each one number for a kind of run: `allocator` (reserved over what is
counted) and `imbalance` (tokens of the fullest expert rank over their mean). A row is predicted
with both fitted to the other groups. Verdicts: a notional device of 0.7 to 1.3 × the measured peak.
Gates: median error ≤ 5 %, at most one group above 12 %, no "fits" below the measured peak, "no"
above it in at most 10 % of the sizes, reserve ≤ 10 % of the capacity.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from rows import STEADY, Row, memory_rows

from shoal.base.estimates.estimate import MemoryEstimate, PlanningCase
from shoal.forecast.fit.memory_fit import judge_memory
from shoal.forecast.fit.peak_memory import predict_memory
from shoal.forecast.memory.framework_memory import FrameworkMemory, framework_memory

__all__ = ["STEADY", "evaluate", "fit", "framework_memory", "group_errors", "memory_rows", "sweep"]

SIZES = [0.70 + 0.01 * step for step in range(61)]
FITTED = ("allocator", "imbalance")


@dataclass(frozen=True)
class Result:
    """One row as predicted with constants that its group had no part in."""

    row: Row
    estimate: MemoryEstimate
    predicted_bytes: float
    shipped_bytes: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_bytes / self.row.measured_bytes - 1


@dataclass(frozen=True)
class Verdicts:
    """Of a sweep of capacities: how often it was wrong, and the largest reserve "fits" asks."""

    false_fits: int
    false_no: float
    reserve: float


def predicted(row: Row, habits: FrameworkMemory) -> tuple[MemoryEstimate, float]:
    """The estimate, and of it the quantity that the row measured."""
    estimate = predict_memory(_case(row), row.stage, habits)
    context = estimate.parts.get("context", 0.0)
    size = estimate.peak_bytes - context
    return estimate, estimate.allocated_bytes if row.what == "allocated" else size


def _case(row: Row) -> PlanningCase:
    if row.case is None:
        raise ValueError(f"line {row.line}: {row.why}")
    return row.case


def fit(rows: list[Row], name: str) -> float:
    """The value of one constant that misses these rows least; predictions are linear in it.

    Mean square of relative errors, every group with the same weight; the shipped value where no
    row depends on it.
    """
    numerator = denominator = 0.0
    groups = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    for members in groups.values():
        for row in members:
            habits = framework_memory(_case(row).framework)
            at_one = predicted(row, replace(habits, **{name: 1.0}))[1] / row.measured_bytes
            slope = predicted(row, replace(habits, **{name: 2.0}))[1] / row.measured_bytes - at_one
            numerator += slope * (1 - at_one) / len(members)
            denominator += slope * slope / len(members)
    shipped = getattr(framework_memory("shoal"), name)
    return float(1 + numerator / denominator) if denominator > 1e-9 else float(shipped)


def evaluate(rows: list[Row]) -> list[Result]:
    """Every row that has a case, predicted with constants fitted to gated rows of other groups."""
    gated = [row for row in rows if row.gated]
    values: dict[str, dict[str, float]] = {}
    results = []
    for row in rows:
        if row.case is None:
            continue
        if row.group not in values:
            others = [other for other in gated if other.group != row.group]
            values[row.group] = {name: fit(others, name) for name in FITTED}
        habits = framework_memory(row.case.framework)
        estimate, size = predicted(row, replace(habits, **values[row.group]))
        results.append(Result(row, estimate, size, predicted(row, habits)[1]))
    return results


def group_errors(results: list[Result]) -> dict[str, float]:
    """Mean size of the error of every group's rows."""
    errors = defaultdict(list)
    for result in results:
        errors[result.row.group].append(abs(result.error))
    return {group: mean(found) for group, found in errors.items()}


def sweep(results: list[Result]) -> Verdicts:
    """Verdicts on devices of 0.7 to 1.3 × what was measured, on the quantity that was measured."""
    false_fits = false_no = enough = 0
    reserve = 0.0
    for result in results:
        measured, peak = result.row.measured_bytes, result.predicted_bytes
        share = result.estimate.high_bytes / result.estimate.peak_bytes - 1
        seen = replace(
            result.estimate,
            peak_bytes=peak,
            low_bytes=peak * (1 - share),
            high_bytes=peak * (1 + share),
        )
        reserve = max(reserve, 1 - peak / seen.high_bytes)
        for size in SIZES:
            word = judge_memory(seen, size * measured).word
            false_fits += word == "fits" and size < 1 - 1e-9
            enough += size >= 1 - 1e-9
            false_no += word == "no" and size >= 1 - 1e-9
    return Verdicts(false_fits, false_no / max(1, enough), reserve)


def report(rows: list[Row]) -> tuple[list[str], dict[str, object]]:
    """Lines to print, and the same as data."""
    results = evaluate(rows)
    gated = [result for result in results if result.row.gated]
    groups = group_errors(gated)
    found = sweep(gated)
    constants = {name: fit([row for row in rows if row.gated], name) for name in FITTED}
    lines = ["line  measured GiB  predicted  error   what       device, group"]
    for result in sorted(results, key=lambda result: not result.row.gated):
        lines.append(_line(result))
    lines.append("groups (mean size of error, left out of the fits):")
    lines += [f"  {error:6.1%}  {group}" for group, error in groups.items()]
    lines.append("not predicted:")
    lines += [f"  line {row.line}: {row.group}: {row.why}" for row in rows if row.case is None]
    errors = [abs(result.error) for result in gated]
    summary: dict[str, object] = {
        "rows": len(gated),
        "groups": len(groups),
        "median_error": median(errors),
        "median_group_error": median(groups.values()),
        "largest_error": max(errors),
        "groups_above_12_percent": sum(error > 0.12 for error in groups.values()),
        "false_fits": found.false_fits,
        "false_no": found.false_no,
        "reserve": found.reserve,
        "fitted_to_all": constants,
    }
    lines += [f"{name} = {value}" for name, value in summary.items()]
    rows_out = [
        {
            "line": result.row.line,
            "group": result.row.group,
            "device": result.row.device,
            "what": result.row.what,
            "gated": result.row.gated,
            "measured_bytes": result.row.measured_bytes,
            "predicted_bytes": round(result.predicted_bytes),
            "with_shipped_constants_bytes": round(result.shipped_bytes),
            "error": round(result.error, 4),
            "when": result.estimate.when,
            "parts": {name: round(size) for name, size in result.estimate.parts.items()},
            "filled": list(result.row.filled),
            "note": result.row.why,
        }
        for result in results
    ]
    return lines, {"summary": summary, "groups": groups, "rows": rows_out}


def _line(result: Result) -> str:
    row = result.row
    mark = "" if row.gated else f"  ({row.why})"
    return (
        f"{row.line:4}  {row.measured_bytes / 2**30:12.2f}  {result.predicted_bytes / 2**30:9.2f}  "
        f"{result.error:+6.1%}  {row.what:9}  {row.device[:10]:10} {row.group}{mark}"
    )


def main() -> None:
    """Print the report; with --json, write it too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lines, data = report(memory_rows())
    print("\n".join(lines))
    if arguments.json:
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
