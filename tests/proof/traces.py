"""Traces of four ranks, merged: sound by our own checker, and in agreement with the run's phases.

    python tests/proof/traces.py

Each row trains a small Llama as `shoal train` on four processes of a layout and traces three steps. `shoal trace`
merges them. The checker finds no fault, and compute and waits of each rank are within 5 % of the seconds that
the run's own `rank_steps` has. Results: proof/results/traces.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "proof"))

from kept_rows import parser_of, versions  # noqa: E402
from source import source_hash  # noqa: E402

TARGET = ROOT / "proof" / "results" / "traces.json"
DEADLINE_S, GATE = 300.0, 0.05
COMMON = (
    "train.steps=6", "train.trace=4:6", "train.prove=off", "train.batch=16", "train.micro_batch=2",
    "train.validate_every=0", "checkpoint.every=99", "model.layers=4", "model.dim=64", "data.sequence=32",
)  # fmt: skip
LAYOUTS = {
    "ddp": ["layout.strategy=ddp"],
    "zero2": ["layout.strategy=zero2"],
    "fsdp": ["layout.strategy=fsdp"],
    "hsdp": ["layout.strategy=hsdp"],
    "tp x ddp": ["layout.tp=2", "layout.dp_replicate=2"],
    "tp x pp": ["layout.tp=2", "layout.pp=2"],
    "pp": ["layout.pp=4"],
    "cp x pp": ["layout.cp=2", "layout.pp=2"],
}


def shoal(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a working folder."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SHOAL_CACHE": str(here / "cache"), "OMP_NUM_THREADS": "1"}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=here, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def traced(here: Path, name: str) -> dict[str, Any]:
    """Return the row of a layout."""
    place = name.replace(" ", "").replace(",", "-")
    words = [*COMMON, *LAYOUTS[name], "launch.processes=4", f"run.name={place}"]
    trained = shoal(here, "train", *words)
    if trained.returncode:
        return {"layout": name, "sound": False, "failure": trained.stderr[-600:]}
    done = shoal(here, "trace", f"runs/{place}", "--json")
    if not done.stdout.startswith("{"):
        return {"layout": name, "sound": False, "failure": done.stderr[-600:]}
    found = json.loads(done.stdout)
    gaps = found["differs_from_phases"]
    return {
        "layout": name,
        "sound": not found["faults"],
        "faults": found["faults"],
        "differs_from_phases": None if None in gaps else max(gaps),
        "clock_error_us": found["clock_error_us"],
        "ranks": found["ranks"],
    }


def main() -> int:
    """Run all rows, write them, and judge."""
    parser_of(__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="traces-") as folder:
        for name in LAYOUTS:
            rows.append(traced(Path(folder), name))
            print(
                json.dumps({key: value for key, value in rows[-1].items() if key != "ranks"}),
                flush=True,
            )
    sound = sum(row["sound"] for row in rows)
    near = [row for row in rows if row.get("differs_from_phases") is not None]
    most = max((row["differs_from_phases"] for row in near), default=1.0)
    told = {
        "source": source_hash(),
        **versions(),
        "sound": f"{sound} of {len(rows)}",
        "gate": GATE,
        "most": most,
    }
    TARGET.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    return 0 if sound == len(rows) == len(near) and most <= GATE else 1


if __name__ == "__main__":
    sys.exit(main())
