"""What an earlier commit computed, to the bit: is it what this one computes?

    python tests/proof/golden.py --against COMMIT      every layout × a few models, and twenty plans
    python tests/proof/golden.py --against COMMIT --only "tp2 gpt"

A change of structure must change no number. A row is one `shoal train` command of six steps: every
loss, gradient norm and sample of its metrics and every byte of its last checkpoint (two islands:
of each); or a loop of one's own, likewise; or a script of accelerate's (`golden_loops.py`); or one
`shoal plan --json`. The earlier commit has a worktree of its own. Where the two differ it runs the
row again: one that differs from itself counts for nothing. Its results are numbers of this machine
and stay on it (build/golden/COMMIT.json), so that they are computed once for many changes. Verdicts
stand in proof/results/golden.json, row by row: stopped, it goes on; a change of the source begins
anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proof"), str(ROOT / "tests" / "worlds"), str(ROOT / "tests")]

import golden_loops  # noqa: E402
from compositions_drawn import BASE, MODELS, Words, furnish  # noqa: E402
from source import source_hash  # noqa: E402

from cli_run import final_hashes, trajectory  # noqa: E402

TARGET = ROOT / "proof" / "results" / "golden.json"
DEADLINE_S = 300.0

LAYOUTS: dict[str, Words] = {
    "single": {"layout.strategy": "single", "launch.processes": "1"},
    "dp2": {"layout.strategy": "dp", "launch.processes": "1"},
    "ddp4": {"layout.strategy": "ddp", "launch.processes": "4"},
    "zero1": {"layout.strategy": "zero1", "launch.processes": "2"},
    "zero2": {"layout.strategy": "zero2", "launch.processes": "2"},
    "fsdp2": {"layout.strategy": "fsdp", "launch.processes": "2"},
    "hsdp4": {"layout.strategy": "hsdp", "launch.processes": "4"},
    "tp2": {"layout.tp": "2", "launch.processes": "2"},
    "cp2": {"layout.cp": "2", "launch.processes": "2"},
    "pp2": {"layout.pp": "2", "launch.processes": "2"},
    "zbv2": {"layout.pp": "2", "layout.schedule": "zbv", "launch.processes": "2"},
    "tp2 pp2": {"layout.tp": "2", "layout.pp": "2", "launch.processes": "4"},
    "tp2 fsdp2": {"layout.tp": "2", "layout.dp_shard": "2", "layout.zero": "3",
                  "launch.processes": "4"},
}  # fmt: skip
KINDS: dict[str, Words] = {
    "llama": MODELS["llama"],
    "gpt": {**MODELS["gpt"], "model.dropout": "0.1", "optimizer.clip": "0.5"},
    "own": {**MODELS["own"], "precision.compute": "bf16"},
    "hf": MODELS["hf"],
}
EXPERTS: dict[str, Words] = {
    "ep2": {"layout.ep": "2", "layout.dp_replicate": "2", "launch.processes": "2"},
    "ddp2": {"layout.strategy": "ddp", "launch.processes": "2"},
}
POLICIES: dict[str, Words] = {
    "full": {"memory.recompute": "full", "layout.strategy": "fsdp", "launch.processes": "2"},
    "selective": {"memory.recompute": "selective", "layout.tp": "2", "launch.processes": "2"},
    "fp16": {"precision.compute": "fp16", "layout.strategy": "ddp", "launch.processes": "2"},
    "int8": {"layout.compress": "int8", "layout.strategy": "ddp", "launch.processes": "2"},
    "average": {"optimizer.average": "0.9", "layout.strategy": "zero1", "launch.processes": "2"},
}
ISLANDS: Words = {
    "islands.method": "diloco", "islands.count": "2", "islands.period": "3", "islands.pace": "equal",
    "launch.processes": "1",
}  # fmt: skip
PLANS = [
    f"model.name={model} train.batch=64 data.sequence=2048 --on {machines}"
    for model in ("llama-3-8b", "llama-3-70b", "gpt", "moe", "resnet")
    for machines in ("8xH100-80GB", "2x8xA100-80GB", "16x8xH100-80GB", "4xRTX4090")
]


def rows() -> dict[str, list[str]]:
    """Name → what follows `shoal` on the command line."""
    # The default of 0.1; since then it follows the layout.
    common = {**BASE, "train.micro_batch": "1", "train.steps": "6", "checkpoint.every": "6"}
    common["train.prove"] = "off"
    drawn = {
        **{
            (n, k): {**words, **layout}
            for n, layout in LAYOUTS.items()
            for k, words in KINDS.items()
        },
        **{(n, "moe"): {**MODELS["moe"], **layout} for n, layout in EXPERTS.items()},
        **{(n, "llama"): {**MODELS["llama"], **policy} for n, policy in POLICIES.items()},
    }
    trained = {
        f"{layout} {kind}": ["train", *(f"{k}={v}" for k, v in {**common, **words}.items())]
        for (layout, kind), words in drawn.items()
    }
    islands = ["train", *(f"{k}={v}" for k, v in {**common, **MODELS["llama"], **ISLANDS}.items())]
    plans = {f"plan {words}": ["plan", *words.split(), "--json"] for words in PLANS}
    return {**trained, **golden_loops.rows(), "islands llama": islands, **plans}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, metavar="COMMIT")
    parser.add_argument("--only", help="this row, without keeping it")
    parser.add_argument("--into", type=Path, default=TARGET)
    options = parser.parse_args()
    commit = _git("rev-parse", "--short", options.against)
    known = {"against": commit, "source": source_hash()}
    kept = {} if options.only else _kept(options.into, known)
    results = ROOT / "build" / "golden" / f"{commit}.json"
    earlier = json.loads(results.read_text()) if results.exists() else {}
    with (
        tempfile.TemporaryDirectory(prefix="golden-") as folder,
        Worktree(commit) as before,
        ThreadPoolExecutor(2) as both,  # the earlier commit and this one at a time
    ):
        for name, words in rows().items():
            if name in kept or options.only not in (None, name):
                continue
            began_s = time.monotonic()
            if name not in earlier:
                old = both.submit(run, before(), Path(folder), words)
            new = both.submit(run, ROOT, Path(folder), words).result()
            if name not in earlier:
                earlier[name] = [old.result()]
            if new != earlier[name][0] and len(earlier[name]) == 1:
                earlier[name].append(run(before(), Path(folder), words))
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(earlier))
            kept[name] = verdict(earlier[name][0], earlier[name][-1], new)
            print(f"{name}: {kept[name]} ({time.monotonic() - began_s:.0f} s)", flush=True)
            if not options.only:
                counts = dict(Counter(text.split(":")[0] for text in kept.values()))
                record = {**known, "counts": counts, "rows": kept}
                options.into.write_text(json.dumps(record, indent=1) + "\n")
    changed = [name for name, text in kept.items() if text.startswith("changed")]
    print(f"{len(kept)} rows against {commit}, {len(changed)} changed: {changed}")
    return 1 if changed else 0


def verdict(old: dict[str, Any], again: dict[str, Any], new: dict[str, Any]) -> str:
    """equal · unsteady (the earlier commit differs from itself) · changed: what, and where first."""
    if old != again:
        return f"unsteady: {first_difference(old, again)}"
    return f"changed: {first_difference(old, new)}" if old != new else "equal"


def run(tree: Path, folder: Path, words: list[str]) -> dict[str, Any]:
    """What the command gave with the source of `tree`, as JSON would have it."""
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        here = Path(fresh)
        furnish(here)
        environ = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{here}",
                   "SHOAL_CACHE": str(folder / f"cache-{tree.name}")}  # fmt: skip
        if words[0].endswith(".py"):
            ended = golden_loops.run_script(words, here, environ, DEADLINE_S)
            return golden_loops.printed(ended) if words[0] == "door.py" else trained(here, ended)
        told = [] if words[0] == "plan" else ["run.name=run"]
        ended = subprocess.run(
            [sys.executable, "-m", "shoal", *words, *told],
            cwd=here, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        if words[0] == "plan":
            return {"code": ended.returncode, "plan": ended.stdout, "line": ended.stderr}
        return trained(here, ended)


def trained(here: Path, ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a run left in its folder, or the folders of its islands."""
    if ended.returncode:
        return {"code": ended.returncode, "line": ended.stderr.strip().splitlines()[-1:]}
    made = here / "runs" / "run"
    folders = sorted(made.glob("island-*")) or [made]
    found: dict[str, Any] = {"code": 0}
    for number, folder in enumerate(folders):
        own = {"steps": trajectory(folder), "hashes": final_hashes(folder)}
        found |= {f"{key} {number}" if number else key: value for key, value in own.items()}
    return dict(json.loads(json.dumps(found)))


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Where two results differ first, in one line."""
    for key in one.keys() | other.keys():
        left, right = one.get(key), other.get(key)
        if left == right:
            continue
        if isinstance(left, list) and isinstance(right, list):
            pairs = zip(left, right, strict=False)
            left, right = next(((a, b) for a, b in pairs if a != b), (len(left), len(right)))
        elif isinstance(left, dict) and isinstance(right, dict):
            name = next(n for n in left.keys() | right.keys() if left.get(n) != right.get(n))
            return f"{key} of {name}"
        elif isinstance(left, str) and isinstance(right, str):
            pairs = zip(left.splitlines(), right.splitlines(), strict=False)
            left, right = next(((a, b) for a, b in pairs if a != b), (len(left), len(right)))
        return f"{key}: {str(left)[:80]} · {str(right)[:80]}"
    return ""


class Worktree:
    """The source of a commit, beside this one: made when it is first asked for, and removed."""

    def __init__(self, commit: str) -> None:
        self.commit = commit
        self.path: Path | None = None

    def __enter__(self) -> Worktree:
        return self

    def __call__(self) -> Path:
        """Where it is."""
        if self.path is None:
            self.path = Path(tempfile.mkdtemp(prefix="before-"))
            _git("worktree", "add", "--force", "--detach", str(self.path), self.commit)
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.path is not None:
            _git("worktree", "remove", "--force", str(self.path))


def _git(*words: str) -> str:
    told = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return told.stdout.strip()


def _kept(path: Path, known: dict[str, str]) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found["rows"] if all(found.get(k) == v for k, v in known.items()) else {}


if __name__ == "__main__":
    sys.exit(main())
