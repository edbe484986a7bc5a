"""Predicted beside measured on this machine: models × layouts × 1 and 2 processes.

Runs `shoal compare` on every model and holds the planner's step time, memory and bytes against what
came out; then asks whether the layout that `auto` takes was within 5 % of the fastest. Needs a
machine with nothing else to do: times are medians of steps.

    python benchmarks/planner/at_hand.py            about 10 minutes on 2 cores
    python benchmarks/planner/at_hand.py --steps 5  rough

Writes benchmarks/planner/results/at-hand.json with every step time.
Facts of the machine are measured first, with `shoal plan --measure`, in a cache of their own: those
of an earlier hour may have been measured beside other work.
Gates: median error of step time ≤ 12 %, of memory ≤ 8 %, of bytes ≤ 2 %; `auto` within 5 %. Where
`auto` seems further off, its layout and the fastest one run again in turn: the median of all runs
counts, and how far runs of the same layout lie apart is the noise beside it.
Memory is what torch's allocator held on the fullest rank, over all threads; every layout is judged,
and the median of each is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from shoal.view.forecast_errors import predicted_and_measured

HERE = Path(__file__).resolve().parent
LAYOUTS = "single,ddp,zero1,zero2,fsdp"
LATE, AGAIN = 0.05, 2
GATES = {"step": 0.12, "memory": 0.08, "sent": 0.02}

DIGITS = ("data.source=digits",)
MODELS: dict[str, tuple[str, ...]] = {
    "llama demo": (),
    "llama wide": ("model.dim=512", "model.layers=3", "data.sequence=256", "train.batch=8"),
    "llama deep": ("model.dim=128", "model.layers=12", "data.sequence=128"),
    "llama bf16": ("model.dim=384", "model.layers=4", "precision.compute=bf16"),
    "mlp": ("model.name=mlp", "model.hidden=1024", "model.layers=4", "train.batch=512", *DIGITS),
    "resnet": ("model.name=resnet", "model.channels=32", "train.batch=128", *DIGITS),
    "encoder": ("model.build=user_models:patches", "train.batch=256", *DIGITS),
    "wide layers": ("model.build=user_models:wide", "train.batch=256", *DIGITS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", default="", help="comma-separated; default: all")
    parser.add_argument("--out", default=str(HERE / "results" / "at-hand.json"))
    options = parser.parse_args()
    chosen = options.models.split(",") if options.models else list(MODELS)
    with tempfile.TemporaryDirectory() as cache:
        for processes in ("1", "2"):
            shoal(["plan", "--measure", "--json", f"launch.processes={processes}"], cache)
        found: dict[str, dict[str, Any]] = {}
        for name in chosen:
            found[name] = compare(MODELS[name], options.steps, cache, LAYOUTS, "1,2")
            if (pick := picked(found[name])) and pick.behind > LATE:
                found[name]["again"] = [
                    compare(MODELS[name], options.steps, cache, pick.both, "2")["rows"]
                    for _ in range(AGAIN)
                ]
            Path(options.out).write_text(json.dumps(found, indent=1) + "\n")
    return report(found)


def compare(
    words: tuple[str, ...], steps: int, cache: str, layouts: str, processes: str
) -> dict[str, Any]:
    """One comparison's document."""
    asked = ["--layouts", layouts, "--processes", processes, "--steps", str(steps)]
    document: dict[str, Any] = json.loads(shoal(["compare", "--json", *asked, *words], cache))
    return document


def shoal(words: list[str], cache: str) -> str:
    """What the command prints, in an empty folder."""
    python_path = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "shoal", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path, "SHOAL_CACHE": cache},
            capture_output=True,
            text=True,
            timeout=1200,
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def report(found: dict[str, dict[str, Any]]) -> int:
    """Print every row and the medians; 0 if the gates hold."""
    errors: dict[str, list[float]] = {name: [] for name in GATES}
    by_layout: dict[str, list[float]] = {}
    print(f"{'model':<14}{'layout':<12}{'step':>9}{'error':>7}{'memory':>8}{'sent':>7}")
    for model, record in found.items():
        for row in record["rows"]:
            pairs = predicted_and_measured(row)
            if "step" not in pairs:
                print(f"{model:<14}{row['layout']:<12}{row['reason'] or 'not foreseen'}")
                continue
            apart = {name: one / other - 1 for name, (one, other) in pairs.items()}
            for name, error in apart.items():
                errors[name].append(abs(error))
            by_layout.setdefault(row["layout"], []).append(apart["memory"])
            cells = "".join(
                f"{apart[name]:>+8.1%}" if name in apart else f"{'':>8}" for name in GATES
            )
            name = f"{row['layout']} {row['parts']}"
            print(f"{model:<14}{name:<12}{pairs['step'][1] * 1e3:7.1f}ms{cells}")
        print(f"{'':<14}{taken(record)}")
    holds = True
    for layout, found_errors in by_layout.items():
        middle, worst = statistics.median(map(abs, found_errors)), max(found_errors, key=abs)
        print(f"memory of {layout}: median error {middle:.1%}, worst {worst:+.1%}")
    for name, gate in GATES.items():
        middle = statistics.median(errors[name])
        holds &= middle <= gate
        print(f"{name}: median error {middle:.1%} of {len(errors[name])} (gate {gate:.0%})")
    return 0 if holds else 1


class Pick(NamedTuple):
    """The layout that the planner puts first, the fastest measured, and what lies between."""

    layout: str
    fastest: str
    behind: float

    @property
    def both(self) -> str:
        """As `--layouts` wants them."""
        return f"{self.layout},{self.fastest}"


def picked(record: dict[str, Any]) -> Pick | None:
    """What `auto` takes on two processes; None if nothing was foreseen."""
    rows = [row for row in record["rows"] if row["parts"] == 2 and row["step_s"]]
    foreseen = [row for row in rows if "step_s" in (row["predicted"] or {})]
    if not foreseen:
        return None
    medians = {row["layout"]: statistics.median(row["step_s"]) for row in rows}
    first_s = min(row["predicted"]["step_s"] for row in foreseen)
    near = [row for row in foreseen if row["predicted"]["step_s"] <= 1.02 * first_s]
    order = LAYOUTS.split(",")
    pick = min(near, key=lambda row: order.index(row["layout"]))["layout"]
    fastest = min(medians, key=lambda layout: medians[layout])
    return Pick(pick, fastest, medians[pick] / medians[fastest] - 1)


def taken(record: dict[str, Any]) -> str:
    """How far the layout that the planner puts first is from the fastest measured one."""
    pick = picked(record)
    if pick is None:
        return "nothing foreseen"
    text = f"auto on 2: {pick.layout}, {pick.behind:+.1%} from the fastest ({pick.fastest})"
    runs = [record["rows"], *record.get("again", ())]
    if len(runs) == 1:
        return text

    def medians(layout: str) -> list[float]:
        own = (r for rows in runs for r in rows if (r["layout"], r["parts"]) == (layout, 2))
        return [statistics.median(row["step_s"]) for row in own]

    ours, theirs = medians(pick.layout), medians(pick.fastest)
    behind = statistics.median(ours) / statistics.median(theirs) - 1
    noise = max(max(times) / min(times) - 1 for times in (ours, theirs))
    verdict = "holds" if behind <= max(LATE, noise) else "LATE"
    return f"{text}; of {len(runs)} runs {behind:+.1%}, A/A {noise:.1%}: {verdict}"


if __name__ == "__main__":
    sys.exit(main())
