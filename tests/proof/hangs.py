"""Sixty hangs of the real command: is the right rank told, in time, and does the run go on?

    python tests/proof/hangs.py [--seconds 3000] [--out proof/results/hangs.json] [--only ddp,pp]
                                [--simulated]

--simulated: the ranks' devices are simulated ones and their group is theirs (tests/simgpu); kept in
proof/results/hangs-simulated.json.

Kinds × ranks × layouts (`worlds/hanging.py` does them), each in a run of its own on this machine. A
trial counts as well when the first hang told is of that rank and of that cause, `waited_s` (the
watch's own clock) is within the learnt deadline + 2 s, the deadline had been learnt from the run,
the run came to its end by a restart with every step in its metrics, and left no process behind. A
link that is cut has no culprit: there "all ranks wait for each other" must be said. It can be stopped and
started again (`kept_trials.py`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
sys.path[:0] = [
    str(HERE.parent / "worlds"),
    str(HERE.parent / "worlds" / "faults"),
    str(HERE.parent),
]

from kept_trials import run_trials  # noqa: E402

from cli_run import lines  # noqa: E402
from forks import shared  # noqa: E402
from test_hangs import ARGUMENTS, WHY, hang  # noqa: E402

SIMULATED = HERE.parent / "simgpu"
TARGET = HERE.parents[1] / "proof" / "results" / "hangs.json"
ALIKE = "all ranks wait for each other"
LATE_S, LEARNT_S, STEPS = 2.0, 60.0, 40
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    # ranks of a run, arguments
    "ddp": (2, ["layout.strategy=ddp"]),
    "ddp of three": (3, ["layout.strategy=ddp", "launch.processes=3", "train.batch=12"]),
    "fsdp": (2, ["layout.strategy=fsdp"]),
    "tp": (2, ["layout.tp=2"]),
    "pp": (2, ["layout.pp=2"]),
    "islands": (2, ["islands.method=diloco", "islands.count=2", "islands.period=10"]),
    "one process": (1, ["launch.processes=1"]),
}
KINDS = ("stopped", "lock", "loop", "barrier", "cut")
WHOLE = ("ddp", "ddp of three", "fsdp", "one process")
"""Layouts that run the module's own forward pass."""


def trials() -> list[dict[str, Any]]:
    """Every trial, in an order in which the first ones already hold some of everything."""
    found = []
    for kind in KINDS:
        for layout, (size, _) in LAYOUTS.items():
            if size == 1 and kind in ("barrier", "cut"):
                continue  # nobody to wait for
            ranks = range(size) if kind != "cut" else [size - 1]
            for rank in ranks:
                place = "forward" if layout in WHOLE and kind != "loop" else "data"
                asked = {"kind": kind, "place": place, "rank": rank}
                asked["after"] = 60 if place == "forward" else 100
                if layout == "islands":
                    asked["island"] = f"island-{rank}"
                found.append({"layout": layout, **asked})
    return sorted(found, key=lambda one: -one["rank"])


def name_of(trial: dict[str, Any]) -> str:
    return f"{trial['layout']}, {trial['kind']}, rank {trial['rank']}"


def one(trial: dict[str, Any]) -> dict[str, Any]:
    """Do a trial; what came out, `wrong` being empty where all is well."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hangs-") as folder:
        try:
            command, code, output = hang(Path(folder), trial, *LAYOUTS[trial["layout"]][1])
        except AssertionError as failure:
            return {"wrong": f"no end: {str(failure)[-400:]}"}
        island = Path(trial.get("island", ""))
        events = lines(command.run / island / "events.jsonl")
        told = [event for event in events if event["event"] == "hang"]
        steps = {row["step"] for row in lines(command.run / island / "metrics.jsonl")}
        hung = (Path(folder) / "hung").exists()
        left = [p.pid for p in psutil.process_iter() if in_folder(p, folder)]
    found = {"code": code, "seconds": round(time.monotonic() - began_s, 1)}
    if told:
        kept = ("rank", "phase", "why", "collective", "waited_s", "deadline_s")
        found |= {"told": {key: told[0][key] for key in kept}}
    return {**found, "wrong": verdict(trial, hung, code, told, steps, left) or ""} | (
        {"output": output[-600:]} if code else {}
    )


def verdict(
    trial: dict[str, Any], hung: bool, code: int, told: list[Any], steps: set[int], left: list[int]
) -> str:
    """What is wrong with a trial; "" for nothing."""
    if not hung:
        return "nothing hung"
    if not told:
        return "nothing was told"
    first = told[0]
    why = ALIKE if trial["kind"] == "cut" else WHY[trial["kind"]]
    if not first["why"].startswith(why):
        return f"another cause: {first['why']}"
    if trial["kind"] != "cut" and first["rank"] != trial["rank"]:
        return f"another rank: {first['rank']}"
    if first["deadline_s"] > LEARNT_S:
        return f"not learnt: {first['deadline_s']}"
    if first["waited_s"] > first["deadline_s"] + LATE_S:
        return f"late: {first['waited_s']} s"
    if len(told) > 1:
        return f"told {len(told)} times"
    if code or (trial["layout"] != "islands" and steps != set(range(1, STEPS + 1))):
        return f"status {code}, {len(steps)} steps"
    return f"left: {left}" if left else ""


def in_folder(process: psutil.Process, folder: str) -> bool:
    try:
        return process.cwd().startswith(folder)
    except psutil.Error:
        return False


def simulate() -> None:
    """Have every process that is started from here on find simulated devices."""
    sys.path.insert(0, str(SIMULATED))
    from simulated import build

    paths = (SIMULATED / "site", HERE.parents[1] / "src", os.environ.get("PYTHONPATH", ""))
    os.environ |= {
        "SIM_LIBRARY": str(build.library()),
        "SIM_DEVICES": "4",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def main() -> int:
    simulated = "--simulated" in sys.argv
    if simulated:
        sys.argv.remove("--simulated")
        simulate()
    shared()  # imports once
    target = TARGET.with_name("hangs-simulated.json") if simulated else TARGET
    more = {"arguments": ARGUMENTS, "devices": "simulated" if simulated else "cpu"}
    return run_trials(__doc__, target, trials(), name_of, one, lambda done: more)


if __name__ == "__main__":
    sys.exit(main())
