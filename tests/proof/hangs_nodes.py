"""Hangs of a run on two nodes under torchrun: is the right rank told, in time, and by its own node?

    python tests/proof/hangs_nodes.py [--seconds 3000] [--out proof/results/hangs-nodes.json]

Kinds of hangs × ranks × whether the nodes share a disk (`worlds/nodes_hang.py` does them): two
agents, each in a network namespace, their rendezvous in a third. A trial counts as well when the one
hang told is of that rank and of that cause, its line stands in the log of that rank's node,
`waited_s` (the watch's own clock) is within the learnt deadline + 2 s, and the run came to its end
by a restart, if the rank cannot come back; whoever is only busy must be left alone. A node whose
link is cut must be told by the other one as away, within 10 s + 4; clean runs must stay silent. It can be stopped
and started again (`kept_trials.py`).
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]
sys.path[:0] = [str(HERE.parent / "worlds"), str(HERE.parent)]

from kept_trials import run_trials  # noqa: E402

from nodes_hang import ENDED, STEPS, on_two_nodes  # noqa: E402
from shoal.launch.watch.blamed_rank import GONE  # noqa: E402
from test_hangs import WHY  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "hangs-nodes.json"
KINDS = ("lock", "barrier", "loop", "stopped", "down", "none")
LATE_S, LEARNT_S, AWAY_S = 2.0, 60.0, 14.0


def trials() -> list[dict[str, Any]]:
    """Every trial; those of kinds in which nothing is counted apart from ranks come once."""
    found = []
    for own in (False, True):
        for kind in KINDS:
            for rank in (1, 0) if kind != "none" else (0,):
                place = "data" if kind in ("loop", "lock") else "forward"
                after = 100 if place == "data" else 60
                asked = {"kind": kind, "place": place, "rank": rank, "after": after}
                found.append({"layout": "own disks" if own else "one disk", "asked": asked})
    return found


def name_of(trial: dict[str, Any]) -> str:
    return f"{trial['layout']}, {trial['asked']['kind']}, rank {trial['asked']['rank']}"


def one(trial: dict[str, Any]) -> dict[str, Any]:
    """Do a trial; what came out, `wrong` being empty where all is well."""
    began_s, own = time.monotonic(), trial["layout"] == "own disks"
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        try:
            found = on_two_nodes(Path(folder), trial["asked"], own=own)
        except Exception as failure:
            return {"wrong": f"no end: {str(failure)[-600:]}"}
    kept = ("rank", "phase", "why", "collective", "waited_s", "deadline_s", "ends_in_s")
    told = [[{key: event[key] for key in kept} for event in node] for node in found["told"]]
    return {
        "seconds": round(time.monotonic() - began_s, 1),
        "codes": found["codes"],
        "told": told,
        "wrong": verdict(trial["asked"], found, told, own=own),
    }


def verdict(
    asked: dict[str, Any], found: dict[str, Any], told: list[list[dict[str, Any]]], *, own: bool
) -> str:
    """What is wrong with a trial; "" for nothing."""
    kind, rank = asked["kind"], asked["rank"]
    ends = kind in ENDED
    if found["left"]:
        return f"left: {found['left']}"
    if kind in (*ENDED, "none") and found["codes"] != [0, 0]:
        return f"status {found['codes']}: {[said[-400:] for said in found['said']]}"
    if ends or kind == "none":
        steps = found["steps"] if own else found["steps"][:1]
        if any(one != list(range(1, STEPS + 1)) for one in steps):
            return f"{[len(one) for one in found['steps']]} steps"
    if kind == "none":
        return f"told {told}" if any(told) else ""
    if not own and told[0] != told[1]:
        return "two files, one disk"
    if kind == "down":  # each side tells of the other one, and can know no more
        line = rf"no rank goes on for ([\d.]+) s: rank {rank} on [^\n]*{GONE}"
        told_s = re.search(line, found["said"][1 - found["node"][rank]])
        if told_s is None:
            return f"told {told}"
        return f"late: {told_s[1]} s" if float(told_s[1]) > AWAY_S else ""
    here = told[1 - found["node"][rank]]
    for node in (0, 1):
        if [one["rank"] for one in told[node]] != [rank]:
            return f"told on node {node}: {told[node]}"
    if not here[0]["why"].startswith(WHY[kind]):
        return f"another cause: {here[0]['why']}"
    if here[0]["deadline_s"] > LEARNT_S:
        return f"not learnt: {here[0]['deadline_s']}"
    if here[0]["waited_s"] > here[0]["deadline_s"] + LATE_S:
        return f"late: {here[0]['waited_s']} s"
    if f"rank {rank} on " not in found["said"][found["node"][rank]]:
        return "its own node did not say it"
    return "" if ends or found["codes"] == [None, None] else f"ended: {found['codes']}"


if __name__ == "__main__":
    sys.exit(run_trials(__doc__, TARGET, trials(), name_of, one, lambda done: {}))
