"""Trials of faults that take longer than one sitting: resumable, each kept with what was wrong with it."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from processes import machine
from source import source_hash

Trial = dict[str, Any]


def run_trials(
    doc: str | None,
    target: Path,
    trials: Sequence[Trial],
    name_of: Callable[[Trial], str],
    one: Callable[[Trial], Trial],
    more: Callable[[dict[str, Trial]], Trial],
) -> int:
    """Run the trials that this source has not had, and write `target` after each; 1 if one is wrong.

    A trial keeps the hash of the source that it was made with; those that were never made come
    first, then those of other sources, the wrong ones before the others.

    one    runs a trial; what it gives has `wrong`, "" where nothing is, and what was `told`
    more   of all that are done, by name: what the record says beside them
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3000.0, help="begin none after that")
    parser.add_argument("--out", type=Path, default=target)
    parser.add_argument("--only", default="", help="layouts")
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    source = source_hash()
    named = {name_of(trial): trial for trial in trials}
    kept = record.get("trials", {})
    done = {name: kept[name] for name in named if name in kept}

    def turn(name: str) -> int:
        return 0 if name not in done else 1 if done[name]["wrong"] else 2

    began_s = time.monotonic()
    for name in sorted(named, key=turn):  # stable: in the order of `trials` otherwise
        trial = named[name]
        if options.only and trial["layout"] not in options.only.split(","):
            continue
        if done.get(name, {}).get("source") == source:
            continue
        if time.monotonic() - began_s > options.seconds:
            break
        found = done[name] = {**one(trial), "source": source}
        print(name, "·", found["wrong"] or "well", json.dumps(found.get("told")), flush=True)
        record = {
            "of": len(trials),
            "done": len(done),
            "wrong": sorted(name for name, found in done.items() if found["wrong"]),
            **more(done),
            "sources": dict(Counter(found["source"] for found in done.values())),
            "machine": machine(),
            "trials": {name: done[name] for name in named if name in done},
        }
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return int(any(found["wrong"] for found in done.values()))
