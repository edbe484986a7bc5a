"""The guards of a step: what each costs, what it is for, which tests fail without it.

    python tests/proof/guards.py          the table, after a run of two ranks: `make guards`
    python tests/proof/guards.py --off    each guard off, one after another: `make proof PART=guards`

Costs are processor seconds of rank 0 inside of a guard's own methods, of its processor seconds in
the steps of the demo's model: 40 steps, or `--steps`. Bytes are those of its entries in the step's
all-reduce; what ranks must have in common takes 16 bytes for all guards together.

With a guard off the tests of `POOL` run; those that fail are kept in proof/results/guards.json. The exit
status is 1 if a guard has none, or if one that was kept passes now.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from guard_off import VARIABLE, guard_classes  # noqa: E402

TARGET = ROOT / "proof" / "results" / "guards.json"
POOL = (
    *("tests/worlds/own_loops/test_mistakes.py", "tests/worlds/proofs/test_unlike_ranks.py"),
    *("tests/worlds/faults/test_drift.py", "tests/worlds/own_loops/test_guards.py"),
    *("tests/trainer/test_touched.py", "tests/trainer/test_carried.py"),
    *("tests/trainer/test_untrained_weights.py", "tests/trainer/test_model_notices.py"),
    *("tests/trainer/test_optimizers.py", "tests/trainer/test_suspicions.py"),
    "tests/worlds/own_loops/test_rank_findings.py",
    "tests/trainer/test_damaged_folder.py",
)
PLACES = ("before", "around", "sums", "invariants", "agree", "between", "updating", "updated")
PROCESSES, WARM, DEADLINE_S = 2, 3, 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--off", action="store_true", help="switch each guard off, and test")
    parser.add_argument("--only", help="this guard")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_into:
        measure(options.rank_into, options.steps)
        return 0
    return switched_off(options.only) if options.off else table(options.steps)


def switched_off(only: str | None) -> int:
    """Run the pool without each guard; keep which tests fail."""
    kept: dict[str, Any] = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    plain = failing(None)
    print(f"with all guards: {len(plain)} fail {plain}", flush=True)
    wrong = len(plain)
    for name in [only] if only else sorted(guard_classes()):
        began_s = time.monotonic()
        found = [one for one in failing(name) if one not in plain]
        # By the file's name: tests move from one folder to another.
        here = {Path(one).name for one in found}
        gone = [one for one in kept.get(name, []) if Path(one).name not in here]
        kept[name] = found
        print(
            f"{name}: {len(found)} fail ({time.monotonic() - began_s:.0f} s), gone {gone}",
            flush=True,
        )
        wrong += not found or bool(gone)
        TARGET.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return 1 if wrong else 0


def failing(name: str | None) -> list[str]:
    """Return the test functions of the pool of which some case fails without a guard."""
    environ = {**os.environ, **({VARIABLE: name} if name else {})}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *POOL, "-q", "-p", "no:cacheprovider", "--no-header"],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    return sorted(set(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)))


def table(steps: int) -> int:
    """Print a row for each guard."""
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, "--steps", str(steps), "--rank-into", folder]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*launch, f"--nproc-per-node={PROCESSES}", *words],
            env=environ, check=True, timeout=DEADLINE_S,
        )  # fmt: skip
        told = json.loads((Path(folder) / "0.json").read_text())
    kept = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    print(f"{'guard':26} {'of a step':>9} {'bytes':>6} {'tests':>6}  what for")
    for name, guard in guard_classes().items():
        row = told["guards"].get(name, {"share": 0.0, "bytes": 0})
        why = (inspect.getdoc(guard) or "").splitlines()[0]
        red = len(kept.get(name, ()))
        print(f"{name:26} {row['share']:9.2%} {row['bytes']:6} {red:6}  {why}")
    print(
        f"all: {told['share']:.2%} of {told['step_s'] * 1e3:.0f} ms, {steps} steps of the demo's model"
    )
    return 0


def measure(folder: Path, steps: int) -> None:
    """Train the demo's model under ddp as one rank; write what guards took."""
    import torch

    import shoal
    from shoal.models.catalog import build
    from shoal.models.loss import token_loss

    run = shoal.parallelize(
        lambda: build("llama", {}, vocabulary=2048, sequence=256),
        lambda p: torch.optim.AdamW(p, lr=1e-3), token_loss, "ddp", batch=16,
    )  # fmt: skip
    tokens = torch.randint(
        0, 2048, (8, 257), generator=torch.Generator().manual_seed(run.world.rank)
    )
    batch = tokens[:, :-1], tokens[:, 1:]
    for _ in range(WARM):
        run.step(batch)
    spent_s: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for guard in run.guards.all:
        name = type(guard).__name__
        sizes[name] = 8 * sum(map(len, guard.sums(run.step_count + 1).values()))
        for place in PLACES:
            setattr(guard, place, timed(getattr(guard, place), name, spent_s))
    began_s = time.process_time()
    for _ in range(steps):
        run.step(batch)
    step_s = (time.process_time() - began_s) / steps
    shares = {name: one / steps / step_s for name, one in spent_s.items()}
    rows = {name: {"share": shares[name], "bytes": sizes[name]} for name in shares}
    told = {"guards": rows, "share": sum(shares.values()), "step_s": step_s}
    (folder / f"{run.world.rank}.json").write_text(json.dumps(told))
    run.close()


def timed(method: Any, name: str, spent_s: dict[str, float]) -> Any:
    """A guard's method, whose processor seconds are added up."""

    def call(*given: Any, **named: Any) -> Any:
        began_s = time.thread_time()
        try:
            return method(*given, **named)
        finally:
            spent_s[name] = spent_s.get(name, 0.0) + time.thread_time() - began_s

    return call


if __name__ == "__main__":
    raise SystemExit(main())
