"""What `shoal watch` costs: its share of a core for a minute, and what it changes in the folder.

A program makes a run that goes on at four steps a second, with 8, 64 and 1,024 ranks. `shoal watch`
shows it in a pseudo-terminal of 80 × 24, 120 × 40 and 200 × 60. The processor time comes from
/proc, after the first screen. Every file that only the start of the run wrote must keep its time of
change, and no other name may appear.

    python tests/proof/watch_cost.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "view"), str(HERE.parents[1] / "benchmarks"), str(HERE)]

from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402
from test_watch_terminal import PseudoTerminal, end, start  # noqa: E402
from watched_runs import make_run, write_ranks, write_steps  # noqa: E402

CASES = ((8, 80, 24), (64, 120, 40), (1024, 200, 60))
STEPS_PER_S = 4.0
MOST = 0.03
"""Share of a core."""


def processor_s(pid: int) -> float:
    """The processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def changes(folder: Path) -> dict[str, int]:
    """Times of change of a run's files, those left out that the run itself writes on."""
    grows = ("metrics.jsonl", "node-0.bin")
    return {
        str(path.relative_to(folder)): 0 if path.name in grows else path.stat().st_ctime_ns
        for path in [folder, *folder.rglob("*")]
    }


def measure(folder: Path, ranks: int, columns: int, lines: int, seconds: float) -> dict[str, Any]:
    """One run, watched."""
    make_run(folder, steps=0)
    write_steps(folder, range(1, 2001))
    write_ranks(folder, range(1901, 2001), {5: 0.04}, ranks=ranks)
    before, ended = changes(folder), threading.Event()

    def go_on() -> None:
        step = 2000
        while not ended.wait(1 / STEPS_PER_S):
            step += 1
            write_steps(folder, range(step, step + 1))
            write_ranks(folder, range(step, step + 1), {5: 0.04}, ranks=ranks)

    terminal = PseudoTerminal(columns, lines)
    process = start(terminal, str(folder))
    run = threading.Thread(target=go_on, daemon=True)
    run.start()
    terminal.wait_for("step 20", 120)
    time.sleep(5)
    terminal.read()
    began_s, cpu_s, written = time.monotonic(), processor_s(process.pid), len(terminal.text)
    while time.monotonic() < began_s + seconds:
        terminal.read(0.5)
    cpu_s, took_s = processor_s(process.pid) - cpu_s, time.monotonic() - began_s
    drawn = terminal.text[written:].count("\x1b[1;1H")
    ended.set()
    run.join()
    after = changes(folder)
    code = end(process, lambda: terminal.press("q"))
    return {
        "ranks": ranks,
        "terminal": f"{columns}x{lines}",
        "share_of_a_core": round(cpu_s / took_s, 4),
        "screens_per_s": round(drawn / took_s, 2),
        "bytes_per_s": round((len(terminal.text) - written) / took_s),
        "exit_status": code,
        "changed_files": sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "proof/results/watch.json")
    asked = parser.parse_args()
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder) / "run", *case, asked.seconds))
        print(json.dumps(rows[-1]))
    result = {"rows": rows, "steps_per_s": STEPS_PER_S, "seconds": asked.seconds}
    result |= {"source": source_hash(), "machine": machine()}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [
        row
        for row in rows
        if row["share_of_a_core"] > MOST or row["changed_files"] or row["exit_status"]
    ]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
