"""Draw the pictures of the documentation from committed run folders: `make pictures`.

    python tests/pictures.py            # writes docs/pictures/*.svg

Each picture carries a digest of its texts and data. `tests/test_pictures.py` draws them again and
compares the digests: a new style sheet needs no new picture, a new word or number does. The runs
come from `tests/picture_runs.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shoal.base.runlog.rank_records import FOLDER, HEADER, ROW
from shoal.cli.data_lines import data_lines
from shoal.cli.row_style import RowStyle
from shoal.report.comparison.comparison_page import read_comparison
from shoal.report.comparison.comparison_sections import (
    header_section,
    results_section,
)
from shoal.report.markup import Markup, tag
from shoal.report.run_contents import RunContents, read_run
from shoal.report.sections.curves import list_curves
from shoal.report.sections.overview import overview_section
from shoal.report.sections.rank_heat import ranks_section
from shoal.report.svg_charts import line_chart, sampled_lines
from shoal.view.metrics_server.run_metrics import RunMetrics
from shoal.view.run_table import list_runs, table_lines
from shoal.view.watch.run_watcher import RunWatcher
from shoal.view.watch.styled_lines import Line
from shoal.view.watch.watch_screen import ScreenOptions, render_screen
from svg_pictures import page_svg, terminal_svg

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
RUNS = PICTURES / "runs"
SLOW, FAST = RUNS / "slow-data", RUNS / "fast-data"
CUT = 110
"""Step at which a run stands that is watched."""
COLUMNS, LINES, WIDTH = 80, 24, 880
ALL_COLUMNS = 92
"""Columns of a terminal in which `shoal runs` leaves none of its own out."""
SGR_CODE = re.compile(r"\x1b\[([\d;]*)m")


@contextmanager
def picture_clock(now_s: float) -> Iterator[None]:
    """Stop the clock, in UTC: ages and dates of a picture never change."""
    zone = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        with patch("time.time", lambda: now_s):
            yield
    finally:
        del os.environ["TZ"]
        if zone is not None:
            os.environ["TZ"] = zone
        time.tzset()


def copy_run(run: Path, folder: Path, last_step: int | None = None) -> tuple[Path, float]:
    """Copy a run as it was at its end, or at a step; return the copy, and when that was.

    Args:
        run: a committed run.
        folder: of runs.
        last_step: None: the end. Else a process of another host seems to hold the run.
    """
    copy = folder / run.name
    shutil.copytree(run, copy)
    if last_step is None:
        end_s = read_events(copy)[-1]["time_s"]
    else:
        end_s = cut_run(copy, last_step)
        owner = {"run": run.name, "pid": 1, "host": "node-0", "boot": "other", "born": 1}
        owner["started_s"] = read_events(copy)[0]["time_s"]
        (copy / "owner.json").write_text(json.dumps(owner), encoding="utf-8")
    for path in copy.rglob("*"):
        os.utime(path, (end_s, end_s))
    return copy, end_s


def cut_run(run: Path, last_step: int) -> float:
    """Cut the records of a run after a step; return when that step ended."""
    file = run / FOLDER / "node-0.bin"
    raw = file.read_bytes()
    rows = [raw[at : at + ROW.size] for at in range(HEADER.size, len(raw), ROW.size)]
    kept = [row for row in rows if ROW.unpack(row)[0] <= last_step]
    file.write_bytes(raw[: HEADER.size] + b"".join(kept))
    end_s = max(float(ROW.unpack(row)[3]) for row in kept)
    for name, key, last in (("metrics", "step", last_step), ("events", "time_s", end_s)):
        path = run / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text(
            "".join(line for line in lines if json.loads(line)[key] <= last), encoding="utf-8"
        )
    return end_s


def read_events(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def draw_report(run: Path) -> str:
    """Draw the top of a report: the verdict, the figures and two curves."""
    with picture_clock(read_events(run)[-1]["time_s"]):
        contents = read_run(run)
        charts = tag("div", loss_charts(contents), class_="grid2")
        parts = [overview_section(contents), tag("section", tag("h2", "Curves"), charts)]
    return page_svg(f"shoal report runs/{run.name}", parts, WIDTH, 745)


def loss_charts(run: RunContents) -> Iterator[Markup]:
    """Yield the charts of the loss and of the validation by source."""
    for curve in list_curves([run]):
        if curve.key in ("loss", "sources"):
            lines = [line for one in curve.series for line in sampled_lines(one.label, one.points)]
            yield line_chart(curve.title, lines, x_title="step")


def draw_ranks() -> str:
    """Draw the ranks of a report, without the table of single moments."""
    with picture_clock(read_events(SLOW)[-1]["time_s"]):
        section = ranks_section(read_run(SLOW))
    return page_svg("Time of a step by rank, and who is late", [section], WIDTH, 505)


def draw_comparison() -> str:
    """Draw the top of a report of two runs: verdicts, results and the first difference."""
    with picture_clock(read_events(FAST)[-1]["time_s"]):
        found = read_comparison([SLOW, FAST])
        parts = [make(found) for make in (header_section, results_section)]
    return page_svg("shoal report runs/slow-data runs/fast-data", parts, WIDTH, 580)


def draw_watch() -> str:
    """Draw the screen of `shoal watch` in the middle of a run."""
    with tempfile.TemporaryDirectory() as made:
        run, now_s = copy_run(SLOW, Path(made), CUT)
        with picture_clock(now_s + 0.2):
            lines = render_screen(
                RunWatcher(run).read(), COLUMNS, LINES, ScreenOptions(), time.time()
            )
    return terminal_svg("shoal watch runs/slow-data", lines, COLUMNS)


@contextmanager
def two_runs() -> Iterator[Path]:
    """Make a folder of two runs, one of which goes on; its clock stands two seconds later."""
    with tempfile.TemporaryDirectory() as made:
        first, second = sorted((SLOW, FAST), key=lambda run: read_events(run)[0]["time_s"])
        copy_run(first, Path(made))
        _, now_s = copy_run(second, Path(made), CUT)
        with picture_clock(now_s + 2):
            yield Path(made)


def draw_runs() -> str:
    """Draw the list of two runs."""
    with two_runs() as folder:
        texts = table_lines(list_runs(folder), ALL_COLUMNS, time.time())
    states = {"running": "bold green", "ended": "bold cyan"}
    lines = [tuple(style_words(text, states)) for text in texts]
    return terminal_svg("shoal runs", lines, ALL_COLUMNS)


def draw_metrics() -> str:
    """Draw lines of the page that Prometheus reads."""
    pattern = "^shoal_run_(loss|step_s|tok|worst)"
    with two_runs() as folder:
        texts = RunMetrics(folder).format_page().splitlines()
    lines = []
    for text in texts:
        if re.search(pattern, text):
            name, labels, value = re.split(r"(?={)|(?<=}) ", text)
            lines.append(((name, ""), (labels, "dim"), (f" {value}", "bold")))
    command = f"curl -s 127.0.0.1:9877/metrics | grep -E '{pattern}'"
    return terminal_svg(command, lines, COLUMNS)


def style_words(text: str, styles: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a text in pieces, some words of which have a style."""
    for piece in re.split(rf"\b({'|'.join(styles)})\b", text):
        if piece:
            yield piece, styles.get(piece, "")


def draw_data_look() -> str:
    """Draw the samples of a step, those with the largest losses first."""
    document = json.loads((RUNS / "data-look.json").read_text(encoding="utf-8"))
    texts = data_lines(document, RowStyle(width=100, coloured=True), 3)
    step = document["step"]["step"]
    command = f"shoal data look {document['of']} --step {step} --rows 3"
    return terminal_svg(command, [*map(parse_codes, texts)], 100)


def parse_codes(text: str) -> Line:
    r"""Return a line whose styles are the terminal's codes in it.

    >>> parse_codes("a\x1b[4;32mb\x1b[0mc")
    (('a', ''), ('b', '4;32'), ('c', ''))
    """
    pieces = SGR_CODE.split(f"\x1b[0m{text}")[1:]
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return tuple((words, "" if code in ("", "0") else code) for code, words in pairs if words)


DRAWINGS: dict[str, Callable[[], str]] = {
    "report": lambda: draw_report(SLOW),
    "ranks": draw_ranks,
    "comparison": draw_comparison,
    "watch": draw_watch,
    "runs": draw_runs,
    "metrics": draw_metrics,
    "data-look": draw_data_look,
}
"""Name of each picture, and how it is drawn."""


def write_diagnosis(page: Path) -> None:
    """Write what `shoal diagnose` prints of the slow run into the first block of a page."""
    with tempfile.TemporaryDirectory() as made:
        copy_run(SLOW, Path(made) / "runs")
        words = [sys.executable, "-m", "shoal", "diagnose", "runs/slow-data"]
        shown = subprocess.run(words, cwd=made, capture_output=True, text=True, check=False).stdout
    text = page.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    first = next(block for block in blocks if not block[1])
    page.write_text(f"{text[: first.start(2)]}{shown}{text[first.end(2) :]}", encoding="utf-8")


def main(names: Sequence[str]) -> None:
    """Write the pictures, all or some; with all also the diagnosis on docs/start/slow.md."""
    if not names:
        write_diagnosis(PICTURES.parent / "start" / "slow.md")
    for name in names or DRAWINGS:
        path = PICTURES / f"{name}.svg"
        path.write_text(DRAWINGS[name](), encoding="utf-8")
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
