"""Trials of faults that take longer than one sitting: resumable, each kept with what was wrong with it."""

from __future__ import annotations

import argparse
import json
import time
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
    done = record.get("trials", {}) if record.get("source") == source else {}
    began_s = time.monotonic()
    for trial in trials:
        name = name_of(trial)
        if name in done or (options.only and trial["layout"] not in options.only.split(",")):
            continue
        if time.monotonic() - began_s > options.seconds:
            break
        found = done[name] = one(trial)
        print(name, "·", found["wrong"] or "well", json.dumps(found.get("told")), flush=True)
        record = {
            "of": len(trials),
            "done": len(done),
            "wrong": sorted(name for name, found in done.items() if found["wrong"]),
            **more(done),
            "source": source,
            "machine": machine(),
            "trials": done,
        }
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return int(any(found["wrong"] for found in done.values()))
