"""Models whose micro-batches skip blocks, under fsdp and hsdp, beside one process in float64.

`make proof PART=branches` runs it, some fifteen minutes on 2 cores: 13 models × fsdp (plain, recompute,
written-out passes, AdamW) on 2 and 4 ranks, hsdp and fsdp × pp on 4. Results go to
proof/results/branches.json row by row; rows of this source stay, --fresh begins anew. Exit status 1 if a
row under fsdp or hsdp is not equal, or a pipeline neither equals one process nor names what it
refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "proof" / "results" / "branches.json"
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("worlds", "worlds/faults", "")]

from source import source_hash  # noqa: E402

import branch_case  # noqa: E402
from branch_models import MODELS  # noqa: E402
from precision_case import alone  # noqa: E402
from worlds import Members  # noqa: E402

PIPED = "fsdp × pp"
LAYOUTS: dict[str, Any] = {
    "fsdp": "fsdp",
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    PIPED: {"dp_shard": 2, "pp": 2},
}
WAYS = branch_case.WAYS
GROUPS = [("fsdp", 2, way) for way in WAYS] + [("fsdp", 4, way) for way in WAYS]
GROUPS += [("hsdp", 4, "plain"), (PIPED, 4, "plain")]
LIMITS = {"adamw": 1e-10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="forget what is done already")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    if options.out.exists() and not options.fresh:
        kept = json.loads(options.out.read_text())
        rows = kept["rows"] if kept["source"] == source_hash() else {}
    references: dict[tuple[str, str], Any] = {}
    for layout, size, way in GROUPS:
        due = [kind for kind in MODELS if f"{kind} · {layout} {size} · {way}" not in rows]
        world = Members(size, Path(tempfile.mkdtemp())) if due and layout != PIPED else None
        for kind in due:
            if (kind, way) not in references:
                references[kind, way] = branch_case.train(alone(), "single", kind, **WAYS[way])
            key = f"{kind} · {layout} {size} · {way}"
            if world is None:
                answers = under_torchrun(kind, size, LAYOUTS[layout])
            else:
                answers = world.call(
                    "branch_case:train", layout=LAYOUTS[layout], kind=kind, **WAYS[way]
                )
            rows[key] = judge(answers, references[kind, way], LIMITS.get(way, 1e-12))
            print(key, rows[key], flush=True)
            write(options.out, rows)
        if world is not None:
            world.close()
    verdicts = [row["verdict"] for row in rows.values()]
    print({verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))})
    bad = [key for key, row in rows.items() if row["verdict"] not in allowed(key)]
    print(*bad, sep="\n")
    return bool(bad)


def allowed(key: str) -> set[str]:
    return {"equal", "refused"} if PIPED in key else {"equal"}


SCRIPT = """
import json, os, sys
sys.path[:0] = {folders}
import branch_case
from shoal.base.errors import PlanError
try:
    done = branch_case.train_uncaught({layout}, {kind!r})
except PlanError as failure:
    with open("refused-" + os.environ["RANK"], "w") as file:
        file.write(str(failure))
    raise
with open("answer-" + os.environ["RANK"], "w") as file:
    json.dump(done, file)
"""


def under_torchrun(kind: str, size: int, layout: Any) -> list[Any]:
    """Train a model in processes whose watchdog ends ranks that wait for one that refuses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = SCRIPT.format(folders=sys.path[:3], layout=layout, kind=kind)
        (folder / "loop.py").write_text(text)
        words = ["--nproc-per-node", str(size), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "localhost:0", "loop.py"]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words], cwd=folder, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=600,
            check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return [json.loads(path.read_text()) for path in sorted(folder.glob("answer-*"))]
        refused = [path.read_text() for path in sorted(folder.glob("refused-*"))]
        return [{"error": text} for text in refused] or [
            {"error": f"unnamed: {done.stdout[-500:]} {done.stderr[-2500:]}"}
        ]


def judge(answers: list[Any], reference: Any, limit: float) -> dict[str, Any]:
    """Compare the ranks' losses, norms and weights with one process's."""
    errors = {one["error"] for one in answers}
    if errors != {"nothing was raised"}:
        unnamed = any(error.startswith("unnamed") for error in errors)
        return {"verdict": "fails" if unnamed else "refused", "text": sorted(errors)}
    worst = 0.0
    for one in answers:
        for key in ("losses", "norms"):
            pairs = zip(one[key], reference[key], strict=True)
            worst = max([worst, *(abs(own - wanted) / abs(wanted) for own, wanted in pairs)])
        for own, wanted in zip(one["weights"], reference["weights"], strict=True):
            worst = max(worst, branch_case.distance(own, wanted))
    verdict = "equal" if worst < limit else "differs"
    joined = [one["joined"] for one in answers]
    return {"verdict": verdict, "largest_distance": worst, "joined_visits": joined}


def write(path: Path, rows: dict[str, Any]) -> None:
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "source": source_hash(),
        "task": "five steps of 16 samples in micro-batches of 2, float64, gloo, beside one process",
        "machine": {"platform": platform.platform(), "torch": torch.__version__},
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
