"""`shoal report`: write one HTML file about runs, which opens without network; no torch."""

from __future__ import annotations

import json
from pathlib import Path

import typer

RUNS = typer.Argument(
    ..., metavar="RUN…", help="Run folders or names, also of runs that go on; at most 20."
)
OUT = typer.Option(
    None,
    "--out",
    metavar="FILE",
    help="The file; default: RUN/report.html, or ./comparison.html of several.",
)
AS_JSON = typer.Option(
    False,
    "--json",
    help="One JSON document: path and numbers of the page; of several runs, differences.",
)


def report(runs: list[Path] = RUNS, out: Path = OUT, as_json: bool = AS_JSON) -> None:
    """Write one HTML file about a run: verdict, curves, ranks, layout, history, provenance.

    It prints the verdict, losses, time and parts of a step, and memory, beside their forecast.
    Of several runs: which is better, curves on one axis, settings that differ, and the first step
    at which their losses differ. The file opens from a disk without network. A folder that cannot
    be written gets its report among the temporary files; the path is printed. Exit status: 0, or 2
    without a run folder.
    """
    from shoal.base.text.event_sentences import strip_control_characters
    from shoal.view.diagnosis.run_folders import find_named_run

    runs = [find_named_run(run) for run in runs]
    if len(runs) > 1:
        _report_several(runs, out, as_json)
        return
    from shoal.report.report_page import write_report
    from shoal.report.report_record import report_record, summary_lines
    from shoal.report.run_contents import read_run
    from shoal.report.verdict.run_verdict import find_verdict

    path = write_report(runs[0], out)
    size = path.stat().st_size
    numbers = report_record(read_run(runs[0]), find_verdict(runs[0]))
    if as_json:
        record = {"path": str(path), "bytes": size, **numbers}
        typer.echo(json.dumps(record, indent=1))
        return
    lines = [*summary_lines(numbers), f"{path}: {size / 1e3:.0f} kB"]
    typer.echo("\n".join(map(strip_control_characters, lines)))


def _report_several(runs: list[Path], out: Path | None, as_json: bool) -> None:
    from shoal.base.text.event_sentences import strip_control_characters
    from shoal.report.comparison.best_run import best_run_text
    from shoal.report.comparison.comparison_page import (
        comparison_record,
        read_comparison,
        write_comparison,
    )

    found = read_comparison(runs)
    path = write_comparison(found, out)
    size = path.stat().st_size
    if as_json:
        record = {"path": str(path), "bytes": size, **comparison_record(found)}
        typer.echo(json.dumps(record, indent=1))
        return
    lines = [*found.problems, best_run_text(found), found.summary(), f"{path}: {size / 1e3:.0f} kB"]
    typer.echo("\n".join(strip_control_characters(line) for line in lines))
