"""Promises about seconds, which no test may judge: other work on the machine would decide.

    kill       a rank dies of SIGKILL: until the next committed step ≤ 10 s (2 ranks, each saved)
    island     one of three islands is killed: named within 0.5 s; stopped: by the deadline it was
               given; told to the others a heartbeat's silence later; the link closed within 1.5 s

Steps of pipelines against their action lists: tests/worlds/pipe_makespan.py. Run it on an idle
machine: `python benchmarks/deadlines.py [--trials 5]`. Prints every figure; exit 1 beyond a bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("src", "tests/worlds", "tests")]

from cli_run import TOY_ARGUMENTS, CommandLine  # noqa: E402
from plane_case import FAULT_DEADLINE_S  # noqa: E402
from shoal.fabric.islands.heartbeat import BEAT_S, SILENT_S  # noqa: E402

KILL_S, NOTICED_S, CLOSED_S = 10.0, 0.5, 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    trials = parser.parse_args().trials
    late = [f"kill: {took_s:.1f} s" for took_s in kills(trials) if took_s > KILL_S]
    late += islands()
    print("\n".join(late) or "all within their bounds")
    return 1 if late else 0


def kills(trials: int) -> list[float]:
    """Seconds from a kill to the next committed step."""
    found = []
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            found.append(one_kill(Path(folder)))
        print(f"kill to next committed step: {found[-1]:.2f} s", flush=True)
    return found


def one_kill(folder: Path) -> float:
    command = CommandLine(folder, *TOY_ARGUMENTS, "launch.processes=2", "checkpoint.every=1")
    command.wait_for(lambda: command.steps() >= 4)
    command.kill(1)
    killed_s, before = time.monotonic(), command.steps()
    command.wait_for(lambda: command.events("resumed") != [])
    command.wait_for(lambda: command.steps() > before)
    took_s = time.monotonic() - killed_s
    command.finish()
    return took_s


def islands() -> list[str]:
    """What was too late when an island was killed or stopped in either half of an exchange."""
    script = str(ROOT / "tests" / "worlds" / "plane_case.py")
    done = subprocess.run(
        [sys.executable, script, "faults"], capture_output=True, text=True, timeout=120, check=True
    )
    late = []
    for case, answers in json.loads(done.stdout).items():
        if case == "late":
            continue
        noticed_s = NOTICED_S if case.startswith("KILL") else FAULT_DEADLINE_S + NOTICED_S
        for told in answers:
            bounds = {
                "after_s": noticed_s,
                "took_s": told["after_s"] + SILENT_S + 2 * BEAT_S + 0.5,
                "close_s": CLOSED_S,
            }
            figures = {name: round(told[name], 2) for name in bounds}
            print(f"{case}: {figures}", flush=True)
            late += [f"{case}: {name}" for name, most in bounds.items() if told[name] > most]
    return late


if __name__ == "__main__":
    sys.exit(main())
