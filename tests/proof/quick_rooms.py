"""CPU seconds of `make quick` for every room: `make proof PART=rooms`.

    python tests/proof/quick_rooms.py            all rooms
    python tests/proof/quick_rooms.py data wire  these alone, added to the results

Each room runs as its own `python tests/quick.py ROOM`, after one run of mypy that fills its cache.
The seconds are those of the command and of all its processes. Results: proof/results/quick-rooms.json;
the exit status is 1 if a room is red or takes more than MOST_S.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests")]

from source import source_hash  # noqa: E402

from quick import BIN, cpu_s, known_rooms  # noqa: E402

TARGET = ROOT / "proof" / "results" / "quick-rooms.json"
MOST_S = 80.0
"""CPU seconds of one room, with ruff, imports and types."""
CHECK = re.compile(r"^(\w+): (well|RED), ([\d.]+) CPU s$", re.MULTILINE)


def measure(room: str) -> dict[str, Any]:
    """Run `make quick` of a room; return its CPU seconds, in all and by check."""
    before_s = cpu_s()
    command = [sys.executable, "tests/quick.py", room]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    checks = {name: float(seconds) for name, _, seconds in CHECK.findall(done.stderr)}
    row = {"cpu_s": round(cpu_s() - before_s, 1), "checks": checks, "load": os.getloadavg()[0]}
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
    return {**row, "status": done.returncode}


def main() -> int:
    """Measure rooms, print a line for each, and keep the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("rooms", nargs="*", help="rooms of src/shoal")
    rooms = parser.parse_args().rooms or known_rooms()
    kept = json.loads(TARGET.read_text())["rooms"] if TARGET.exists() else {}
    subprocess.run([str(BIN / "mypy")], cwd=ROOT, check=False, capture_output=True)
    missed = []
    for room in rooms:
        row = kept[room] = {**measure(room), "source": source_hash()}
        print(f"{room:12} {row['cpu_s']:6.1f} CPU s  {row['checks']}", flush=True)
        if row["status"] or row["cpu_s"] > MOST_S:
            missed.append(room)
        told = {"most_s": MOST_S, "rooms": {name: kept[name] for name in sorted(kept)}}
        TARGET.write_text(json.dumps(told, indent=1) + "\n")
    if missed:
        print(f"red, or more than {MOST_S:.0f} CPU s: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
