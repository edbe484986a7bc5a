"""Replays of drawn steps of drawn runs: equal to the bit on the run's layout, to rounding elsewhere.

    python tests/proof/replays.py [--seed 51]

Five runs (single, ddp, fsdp, tensor parallel, pipeline; dropout on) train twelve steps with saves
every fourth. Of each, four steps are drawn and repeated on its own layout, then four on another
one. Then pairs of runs with one planted difference each are compared: the first step and tensor
that `shoal replay --against` names are those that the plant moves first.
Results: proof/results/replays.json.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proof"), str(ROOT / "tests" / "worlds"), str(ROOT / "tests")]

from compositions_drawn import BASE, MODELS, Words, furnish  # noqa: E402
from kept_rows import counted, parser_of, rows_before, versions  # noqa: E402
from source import source_hash  # noqa: E402

TARGET = ROOT / "proof" / "results" / "replays.json"
DEADLINE_S = 600.0
STEPS = 12
COMMON: Words = {**BASE, "train.micro_batch": "2", "train.steps": str(STEPS), "checkpoint.every": "4",
                 "checkpoint.keep": "9", "train.prove": "off", "train.validate_every": "5"}  # fmt: skip
RUNS: dict[str, tuple[str, Words]] = {
    "single": ("gpt", {"layout.strategy": "single", "launch.processes": "1"}),
    "ddp": ("llama", {"layout.strategy": "ddp", "launch.processes": "2"}),
    "fsdp": ("gpt", {"layout.strategy": "fsdp", "launch.processes": "2"}),
    "tp": ("llama", {"layout.tp": "2", "launch.processes": "2"}),
    "pp": ("gpt", {"layout.pp": "2", "launch.processes": "2"}),
}
OTHERS: dict[str, list[str]] = {
    "single": ["layout.strategy=ddp", "launch.processes=2"],
    "ddp": ["--layout", "single"],
    "fsdp": ["layout.strategy=ddp"],
    "tp": ["--layout", "single"],
    "pp": ["--layout", "single"],
}
DROPOUT: Words = {"model.dropout": "0.1"}
PLANTS: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "seed": (["train.seed=1"], 1, ("weights before",)),
    "second moment": (["optimizer.betas=[0.9,0.999]"], 1, ("weights after",)),
    "weight decay": (["optimizer.weight_decay=0.2"], 1, ("weights after",)),
    "learning rate": (["optimizer.lr=0.0011"], 1, ("weights after",)),
    "clip": (["optimizer.clip=0.1"], 1, ("gradients",)),
    "dropout": (["model.dropout=0.11"], 1, ("forward",)),
    "batch": (["train.batch=12"], 1, ("forward",)),
    "warm-up": (["optimizer.warmup_steps=4"], 1, ("weights after",)),
    "a layer": (["model.layers=2"], 1, ("weights before",)),
    "format": (["precision.compute=bf16"], 1, ("forward",)),
}
"""Name → (settings of the second run, the first step, kinds of tensor that it moves first)."""


def shoal(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a working folder."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{here}", "SHOAL_CACHE": str(here / "c")}
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=here, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip


def train(here: Path, name: str, kind: str, words: Words, *more: str) -> None:
    """Train a run, unless it is there.

    Raises:
        RuntimeError: it ended badly.
    """
    if (here / "runs" / name / "checkpoints").is_dir():
        return
    dropout = DROPOUT if kind == "gpt" else {}
    settings = [f"{k}={v}" for k, v in {**COMMON, **MODELS[kind], **dropout, **words}.items()]
    done = shoal(here, "train", *settings, f"run.name={name}", *more)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-800:]}")


def repeat(here: Path, name: str, step: int, words: list[str], *, is_same: bool) -> dict[str, Any]:
    """Return what one replay found."""
    done = shoal(here, "replay", f"runs/{name}", "--step", str(step), "--json", *words)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {"outcome": "failed", "line": done.stderr.strip()[-300:]}
    good = found["repeats"] and found["same_layout"] == is_same
    row = {"outcome": "equal" if good else "different", "steps": found["compared_steps"],
           "from": found["from_step"], "layout": found["layout"]}  # fmt: skip
    return row | ({} if good else {"difference": found["difference"]})


def part(here: Path, plant: str) -> dict[str, Any]:
    """Return what `--against` named for a planted difference."""
    words, step, kinds = PLANTS[plant]
    name = plant.replace(" ", "-")
    train(here, name, "gpt", RUNS["single"][1], *words)
    done = shoal(here, "replay", "runs/single", "--against", f"runs/{name}", "--json")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return {"outcome": "failed", "line": done.stderr.strip()[-300:]}
    tensor = found["tensor"] or {}
    named = tensor.get("step") == step and tensor.get("kind") in kinds
    key = words[0].partition("=")[0]
    told = any(one.startswith(key) for one in found["differing_keys"])
    return {
        "outcome": "named" if named and told else "not named",
        "tensor": tensor,
        "number": found["number"],
        "key told": told,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=51)
    options = parser.parse_args()
    source = source_hash()
    rows = rows_before(options, TARGET, source)
    dice = random.Random(options.seed)
    drawn = {name: dice.sample(range(1, STEPS + 1), 4) for name in RUNS}
    with tempfile.TemporaryDirectory(prefix="replays-") as folder:
        here = Path(folder)
        furnish(here)
        for name, (kind, words) in RUNS.items():
            for step in drawn[name]:
                for what, more in (("same", []), ("other", OTHERS[name])):
                    key = f"{what} {name} {step}"
                    if key not in rows:
                        train(here, name, kind, words)
                        found = repeat(here, name, step, more, is_same=what == "same")
                        keep(rows, key, {"source": source, **found}, options.seed)
        for plant in PLANTS:
            if f"plant {plant}" not in rows:
                train(here, "single", *RUNS["single"])
                keep(rows, f"plant {plant}", {"source": source, **part(here, plant)}, options.seed)
    bad = [key for key, row in rows.items() if row["outcome"] not in ("equal", "named")]
    print(f"{len(rows)} rows: {counted(row['outcome'] for row in rows.values())}; bad: {bad}")
    return 1 if bad else 0


def keep(rows: dict[str, Any], key: str, row: dict[str, Any], seed: int) -> None:
    """Add a row to the results, and write them."""
    rows[key] = row
    print(f"{key}: {row['outcome']}", flush=True)
    TARGET.write_text(
        json.dumps({"seed": seed, "versions": versions(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
