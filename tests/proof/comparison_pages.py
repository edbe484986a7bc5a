"""Pages of several runs in headless Chromium: sizes, seconds, memory, requests, console, hostile text.

    python tests/proof/comparison_pages.py      result: proof/results/comparison.json, pictures: build/report/

Pages: 20 runs of 100,000 steps (three made ones and copies of them), all run folders of older versions, and
two folders with 200 hostile strings at every place of a text. Each is opened as a page of one run is
(`report_pages.py`); a press in the legend hides a run, a press on a head sorts the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "report"), str(ROOT / "tests" / "proof")]

from chromium import Browser, find_chromium  # noqa: E402
from hostile_folders import hostile_strings, write_hostile_folder  # noqa: E402
from report_pages import PICTURES, look, write_run  # noqa: E402

RESULT = ROOT / "proof" / "results" / "comparison.json"
BYTES, CPU_S, MEMORY_MIB = 1_500_000, 10.0, 300
MEASURE = """
import json, resource, sys, time
from pathlib import Path
from shoal.report.comparison.comparison_page import read_comparison, write_comparison
found = read_comparison([Path(one) for one in sys.argv[2:]])
path = write_comparison(found, Path(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"bytes": path.stat().st_size, "cpu_s": round(time.process_time(), 2),
                  "memory_mib": used.ru_maxrss // 1024, "summary": found.summary()}))
"""
PRESS = """(() => {
  const run = document.querySelectorAll("#runs [data-run]")[1];
  run.click();
  const hidden = run.getAttribute("aria-pressed") === "false";
  run.click();
  const head = document.querySelectorAll("#results th")[2];
  head.click();
  const values = () => [...document.querySelectorAll("#results tbody tr")]
    .map(row => row.cells[2].querySelector("data")).filter(Boolean).map(one => +one.value);
  const up = values();
  head.click();
  const down = values();
  const rises = list => list.every((one, at) => !at || list[at - 1] <= one);
  return {hidden, up: rises(up), down: rises(down.reverse()), rows: up.length};
})()"""


def press(browser: Browser, page: Path) -> list[str]:
    """Press in the legend and on a head; return what did not happen."""
    browser.open(page)
    found = browser.evaluate(PRESS)
    wrong = [name for name in ("hidden", "up", "down") if not found[name]]
    return [f"{page.name}: {name}: {found}" for name in wrong] + browser.complaints()[:3]


def main() -> int:
    """Write the pages, open them, write the result; 1 if something is wrong."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    pages: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for number in range(20):
            if number < 3:
                write_run(root / f"run-{number}", 100_000, 2, seed=number)
            else:
                source = root / f"run-{number % 3}"
                shutil.copytree(source, root / f"run-{number}", copy_function=os.link)
        strings = hostile_strings(200)
        old = ROOT / "tests" / "fixtures" / "run_folders" / "runs"
        groups = {
            "several-20": [root / f"run-{number}" for number in range(20)],
            "several-old": sorted(old.iterdir()),
            "several-hostile": [write_hostile_folder(root / f"h{k}", strings[k:]) for k in (0, 1)],
        }
        for name, folders in groups.items():
            page = str(PICTURES / f"{name}.html")
            command = [sys.executable, "-c", MEASURE, page, *map(str, folders)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row = pages[name] = json.loads(done.stdout)
            limits = {"bytes": BYTES, "cpu_s": CPU_S, "memory_mib": MEMORY_MIB}
            wrong += [
                f"{name}: {key} {row[key]}" for key, most in limits.items() if row[key] > most
            ]
    version = ""
    if program := find_chromium():
        browser = Browser(program)
        try:
            version = browser.call("Browser.getVersion")["product"]
            for name, row in pages.items():
                row["seen"], found = look(browser, PICTURES / f"{name}.html")
                wrong += found + press(browser, PICTURES / f"{name}.html")
        finally:
            browser.close()
    else:
        sys.stderr.write("comparison: no Chromium here: pages were written and not opened\n")
    record = {"chromium": version, "wrong": wrong, "pages": pages}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    sys.stderr.write("".join(f"comparison: {one}\n" for one in wrong) or "comparison: all holds\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
