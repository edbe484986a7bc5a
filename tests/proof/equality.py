"""The full table of equality: every layout × every case × 2 and 4 processes, SGD and AdamW.

`make proof` runs it. What is done already stays in proof/results/equality.json, so it can be stopped
and started again; --fresh begins anew. A row counts for the source that it was made with: after a
change of src/shoal all rows are made again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "worlds"))
TARGET = ROOT / "proof" / "results" / "equality.json"

from source import source_hash  # noqa: E402

import trajectory  # noqa: E402
from shoal.view.proof_lines import verdict_line  # noqa: E402
from worlds import Members  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget what is done already")
    fresh = parser.parse_args().fresh
    source = source_hash()
    rows = {} if fresh else done_already(source)
    worlds: dict[int, Members] = {}
    with tempfile.TemporaryDirectory() as logs:

        def started(size: int) -> Members:
            if size not in worlds:
                worlds[size] = Members(size, Path(logs))
            return worlds[size]

        try:
            for layout, case, size in trajectory.table():
                key = f"{layout} {case} {size}"
                if key in rows:
                    continue
                report = trajectory.ask(started, layout, case, size)[0]
                rows[key] = short(report)
                print(f"{key}: {verdict_line(report)}", flush=True)
                write(rows, source)
        finally:
            for world in worlds.values():
                world.close()
    wrong = [key for key, row in rows.items() if row["verdict"] != "equal"]
    print(f"{len(rows)} of {len(trajectory.table())} rows, {len(wrong)} not equal: {wrong}")
    print(f"written: {TARGET.relative_to(ROOT)}")
    return 1 if wrong else 0


def short(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report is worth committing."""
    return {
        "verdict": report["verdict"],
        "reason": report["reason"],
        "cause": report["cause"] and report["cause"]["text"],
        "layout": report["layout"],
        "parameters": len(report["trajectories"][0]["parameters"]) if report["trajectories"] else 0,
        "largest": {t["optimizer"]: t["largest"] for t in report["trajectories"]},
        "seconds": round(report["seconds"], 1),
    }


def done_already(source: str) -> dict[str, Any]:
    try:
        kept = json.loads(TARGET.read_text())
    except (OSError, ValueError):
        return {}
    return kept["rows"] if kept["source"] == source else {}


def write(rows: dict[str, Any], source: str) -> None:
    import torch

    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "source": source,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "definition": "float64; 5 steps each of SGD with momentum (all steps 1e-12) and AdamW "
        "(gradients of step 1 1e-12, weights 1e-10)",
        "rows": rows,
    }
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
