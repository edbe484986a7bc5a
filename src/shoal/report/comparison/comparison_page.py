"""One HTML file about several runs, and the same facts as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.base.runlog.damaged_lines import Record
from shoal.base.text.event_sentences import strip_control_characters
from shoal.report.comparison.best_run import best_run_text
from shoal.report.comparison.compared_runs import read_compared_runs
from shoal.report.comparison.comparison_sections import (
    curves_section,
    differences_section,
    equal_points_section,
    header_section,
    keys_section,
    results_section,
)
from shoal.report.comparison.part_times import step_parts_section
from shoal.report.comparison.run_comparison import Comparison
from shoal.report.markup import Markup, clean_text
from shoal.report.report_page import SCRIPTS, assemble_page, make_sections, write_page
from shoal.report.sections.curves import curve_records, shorten_knots

COMPARISON_FILE = "comparison.html"
SECTIONS: tuple[Callable[[Comparison], Markup], ...] = (
    header_section,
    curves_section,
    results_section,
    step_parts_section,
    differences_section,
    equal_points_section,
    keys_section,
)


def read_comparison(folders: Sequence[Path]) -> Comparison:
    """Read the runs of a comparison.

    Raises:
        ConfigError: too many folders, or no run in any of them.
    """
    return Comparison(*read_compared_runs(folders))


def write_comparison(found: Comparison, out: Path | None = None) -> Path:
    """Write the page of a comparison; return its path.

    Args:
        found: the runs.
        out: the file; None: comparison.html in the working folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    return write_page(make_comparison_page(found), Path(COMPARISON_FILE), out, "comparison")


def make_comparison_page(found: Comparison) -> str:
    """Return the page of several runs."""
    sections = make_sections(SECTIONS, found, "records of its runs")
    names = [clean_text(run.label) for run in found.runs]
    data = {
        "runs": names,
        "curves": curve_records(found.curves),
        "knots": [shorten_knots(run.knots) for run in found.runs],
        "marks": [],
    }
    title = f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''} – Shoal report"
    return assemble_page(title, sections, data, (*SCRIPTS, "comparison.js"))


def comparison_record(found: Comparison) -> Record:
    """Return the facts of the page as JSON."""
    runs: list[dict[str, Any]] = [
        {
            "name": run.label,
            "folder": str(run.contents.folder),
            "state": run.row.state,
            "steps": len(run.series.steps),
            "verdict": run.verdict,
            "step_s": run.step_s,
            f"{run.unit}_per_s": run.rate,
        }
        for run in found.runs
    ]
    for row, one in zip(runs[1:], found.differences, strict=True):
        row["first_different_step"] = one.first_step
        row["three_spreads_step"] = one.separation_step
        row["common_steps"] = one.common_steps
        row["newest_mean_difference"] = one.newest_mean
    return {
        "runs": runs,
        "problems": found.problems,
        "keys": {one.key: list(one.values) for one in found.keys},
        "equal": [
            {"kind": point.kind, "amount": point.amount, "losses": list(point.losses)}
            for point in found.points
        ],
        "best": strip_control_characters(best_run_text(found)),
        "summary": strip_control_characters(found.summary()),
    }
