"""The protocol of members that come and go: drawn worlds, planted bugs, enumerated interleavings.

    python tests/proof/protocol.py [worlds|witness|bugs|space ...] [--rounds 100000] [--states 1000000]

    worlds   rounds of 5 members with all faults at once, each world from a seed of its own
    witness  a tenth as many rounds of 2 or 3 members and a witness
    bugs     each planted bug, and the rounds until a world finds it
    space    all interleavings of 3 members × 2 rounds × 1 fault, and of 2 and a witness, up to so
             many states in all; and of an island and a witness that the other island left

Seconds are of this process's CPU. What was measured stands in proof/results/protocol.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "islands"))

from member_bugs import BUGS, draw_world, find_bug  # noqa: E402
from member_space import FAULTS, LONE, Space, explore  # noqa: E402

TARGET = HERE.parents[1] / "proof" / "results" / "protocol.json"
ROUNDS, MOST_ROUNDS = 50, 10_000
"""Rounds of one world, and those in which a bug must be found."""


def run_worlds(settings: argparse.Namespace) -> dict[str, Any]:
    """Run worlds until so many rounds are merged; a violation ends the program with its seed."""
    return _run_drawn(settings.rounds, witness=False)


def run_witness(settings: argparse.Namespace) -> dict[str, Any]:
    """Run worlds with a witness."""
    return _run_drawn(settings.rounds // 10, witness=True)


def _run_drawn(most: int, *, witness: bool) -> dict[str, Any]:
    rounds = seed = events = sessions = 0
    while rounds < most:
        world = draw_world(seed, witness=witness)
        try:
            rounds += world.run(ROUNDS)
        except Exception as found:
            raise SystemExit(f"seed {seed}: {found}") from found
        events, sessions, seed = events + world.events, sessions + world.sessions, seed + 1
    return {"rounds": rounds, "worlds": seed, "events": events, "meetings": sessions}


def run_bugs(settings: argparse.Namespace) -> dict[str, Any]:
    """Plant each bug, and count the rounds until it is found."""
    found: dict[str, Any] = {}
    for name in BUGS:
        result = find_bug(name, MOST_ROUNDS)
        found[name] = None if result is None else [*result]
        print(f"{name}: {found[name]}", flush=True)
    return {"planted": len(found), "found": sum(map(bool, found.values())), "by_bug": found}


def run_space(settings: argparse.Namespace) -> dict[str, Any]:
    """Explore the space of each fault; a violation ends the program."""
    found: dict[str, Any] = {}

    def note(name: str, space: Space) -> None:
        found[name] = {"states": space.states, "whole": space.whole, "ends": space.finished}
        print(f"{name}: {found[name]}", flush=True)

    for fault in FAULTS:
        for witness in (False, True):
            most = settings.states // len(FAULTS) // (4 if witness else 1)
            name = f"{fault}, with a witness" if witness else fault
            note(name, explore(fault, most=most, witness=witness))
    note("kill, an island and a witness", explore(LONE, rounds=3))
    return {"states": sum(one["states"] for one in found.values()), "by_fault": found}


KINDS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "worlds": run_worlds,
    "witness": run_witness,
    "bugs": run_bugs,
    "space": run_space,
}


def main() -> int:
    """Run the kinds that are named, or all, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--states", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=TARGET)
    settings = parser.parse_args()
    results = json.loads(settings.out.read_text("utf-8")) if settings.out.exists() else {}
    for kind in settings.kinds:
        began_s = time.process_time()
        results[kind] = KINDS[kind](settings)
        results[kind]["cpu_s"] = round(time.process_time() - began_s, 1)
        settings.out.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{kind}: {results[kind]}", flush=True)
    bugs = results.get("bugs", {})
    return int(bugs.get("found") != bugs.get("planted"))


if __name__ == "__main__":
    sys.exit(main())
