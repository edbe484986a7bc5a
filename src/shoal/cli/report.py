"""`shoal report`: write one HTML file about a run, which opens without network; no torch."""

from __future__ import annotations

import json
from pathlib import Path

import typer

RUN = typer.Argument(..., metavar="RUN", help="A run folder, also of a run that goes on.")
OUT = typer.Option(None, "--out", metavar="FILE", help="The file; default: RUN/report.html.")
AS_JSON = typer.Option(False, "--json", help="One JSON document: path, bytes, verdict.")


def report(run: Path = RUN, out: Path = OUT, as_json: bool = AS_JSON) -> None:
    """Write one HTML file about a run: verdict, curves, ranks, layout, history, provenance.

    The file opens from a disk without network. A folder that cannot be written gets its report
    among the temporary files; the path is printed. Exit status: 0, or 2 without a run folder.
    """
    from shoal.base.text.event_sentences import strip_control_characters
    from shoal.report.report_page import write_report
    from shoal.report.verdict.run_verdict import find_verdict

    path = write_report(run, out)
    size = path.stat().st_size
    if as_json:
        verdict = find_verdict(run).line()
        typer.echo(json.dumps({"path": str(path), "bytes": size, "verdict": verdict}))
        return
    typer.echo(strip_control_characters(f"{path}: {size / 1e3:.0f} kB"))
