"""One HTML file about runs: sections in order, styles and scripts inside, nothing loaded.

    python -m shoal.report.report_page RUN …      the reports of runs that have ended, by a watchdog

    verdict  curves  goodput  history  spikes  ranks  communication  forecast  layout  experts  …

The page opens from a disk without network. Its content security policy allows one inline style and
one inline script, by their SHA-256, and images as data: URLs. Without JavaScript it shows the same
numbers; with it, curves get zoom, smoothing, logarithmic axes, and tokens or time below.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from shoal import __version__
from shoal.base.errors import ConfigError, ShoalError, shorten
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.standard_streams import write_error
from shoal.base.text.event_sentences import DAMAGED
from shoal.report.markup import Markup, clean_text, json_script, tag
from shoal.report.run_contents import RunContents, read_run
from shoal.report.sections.curves import curve_data, curves_section, spikes_section
from shoal.report.sections.expert_tokens import experts_section
from shoal.report.sections.history import (
    goodput_section,
    history_section,
    provenance_section,
)
from shoal.report.sections.measured_costs import (
    devices_section,
    forecast_section,
    traffic_section,
)
from shoal.report.sections.overview import overview_section
from shoal.report.sections.pipeline_timeline import pipeline_section
from shoal.report.sections.rank_heat import ranks_section
from shoal.report.sections.rank_layout import layout_section
from shoal.report.sections.statistic_ranges import statistics_section

REPORT_FILE = "report.html"
SCRIPTS = ("uplot.min.js", "report.js")
SECTIONS: tuple[Callable[[RunContents], Markup], ...] = (
    overview_section,
    curves_section,
    goodput_section,
    history_section,
    spikes_section,
    ranks_section,
    traffic_section,
    forecast_section,
    layout_section,
    pipeline_section,
    experts_section,
    statistics_section,
    devices_section,
    provenance_section,
)
"""Sections of one run, in the order of the page; an empty one is left out."""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder; return its path.

    Args:
        folder: a run folder, also of a run that goes on.
        out: the file; None: report.html in the run folder, or in the folder for temporary files
            if the run folder cannot be written.

    Raises:
        ConfigError: no run folder, or `out` cannot be written.
    """
    text = make_page(read_run(folder))
    return write_page(text, folder / REPORT_FILE, out, folder.resolve().name)


def write_end_report(folder: Path) -> str:
    """Write the report of a run that has ended; return "report: FILE", or why there is none.

    Whatever fails in a report is no failure of the run.
    """
    try:
        return f"report: {write_report(folder)}"
    except Exception as failure:  # of whatever kind: the run is complete without a report
        if not folder.exists():  # removed since, as by tempfile.TemporaryDirectory
            return f"report: not written, {folder} is gone"
        why = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return f"report: not written ({shorten(why)}); try: shoal report {shlex.quote(str(folder))}"


def main() -> int:
    """Write the reports of ended runs; report only those that are missing in their folders."""
    for folder in map(Path, sys.argv[1:]):
        if (line := write_end_report(folder)) != f"report: {folder / REPORT_FILE}":
            write_error(f"shoal: {line}")
    return 0


def write_page(text: str, usual: Path, out: Path | None, name: str) -> Path:
    """Write a page; return its path.

    Args:
        text: the page.
        usual: the file if the user names none.
        out: the user's file.
        name: of the file in the folder for temporary files, if `usual` cannot be written.

    Raises:
        ConfigError: `out` cannot be written, or neither other file can.
    """
    path = out or usual
    try:
        write_atomically(path, text)
    except OSError as failure:
        if out is not None:
            raise ConfigError(
                f"--out = {out}: cannot be written: {failure.strerror}; try: a folder that exists "
                "and that you may write"
            ) from failure
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
        path = Path(tempfile.mkdtemp(prefix="shoal-report-")) / f"{name or 'run'}.html"
        try:
            write_atomically(path, text)
        except OSError as second:
            raise ConfigError(
                f"{usual.parent}: report cannot be written there ({failure.strerror}), nor at "
                f"{path}: {second.strerror}; try: --out FILE"
            ) from second
    return path


def make_page(run: RunContents) -> str:
    """Return the page of one run."""
    sections = make_sections(SECTIONS, run, f"its records in {run.folder}")
    return assemble_page(
        f"{clean_text(run.label)} – Shoal report", sections, curve_data(run.curve_runs)
    )


def make_sections(
    makers: Sequence[Callable[[Any], Markup]], found: object, records: str
) -> list[Markup]:
    """Return the sections that are not empty; of damaged records a line that says so.

    Args:
        makers: of each section.
        found: what they show.
        records: names the records that may be damaged.
    """
    sections = []
    for make in makers:
        try:
            sections.append(make(found))
        except (*DAMAGED, ArithmeticError, RecursionError, ShoalError):
            name = make.__name__.removesuffix("_section").replace("_", " ")
            text = f"The section “{name}” is left out: {records} are damaged."
            sections.append(tag("section", tag("p", text, class_="note")))
    return [section for section in sections if section]


def assemble_page(
    title: str, sections: Sequence[Markup], data: object, scripts: Sequence[str] = SCRIPTS
) -> str:
    """Return an HTML document around sections.

    Args:
        title: of the window.
        sections: each a `section` element.
        data: read by the script, JSON.
        scripts: files of `assets`, in order.
    """
    style = _asset("uplot.min.css") + _asset("report.css")
    script = "".join(map(_asset, scripts))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; "
        f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    ]
    body = [
        tag("main", sections),
        tag("footer", f"shoal {__version__}, {made}. One file; it loads nothing."),
        json_script("data", data),
        tag("script", Markup(script)),
    ]
    page = tag("html", tag("head", head), "\n", tag("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _asset(name: str) -> str:
    return resources.files("shoal.report").joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


if __name__ == "__main__":
    sys.exit(main())
