"""Run folders of 3070ad02, resumed by its own source and by this one, side by side, to the bit.

    python tests/proof/old_folders.py            every folder; result: proof/results/old-folders.json
    python tests/proof/old_folders.py ddp tp     some of them, without a result

The folders are fixtures (tests/fixtures/write_run_folders.py). Each makes its steps 3 and 4 on this
machine under both sources: every loss, gradient norm and sample of its rows, and every byte of its
last checkpoint. The earlier source runs twice: a folder that differs from itself counts for nothing.
Folders of `RESPLIT` may differ in the moments named there, by rounding, and in nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proof"), str(ROOT / "benchmarks")]

from golden import Worktree, trained, verdict  # noqa: E402
from processes import machine  # noqa: E402
from source import source_hash  # noqa: E402

COMMIT = "3070ad02"
FIXTURES = ROOT / "tests" / "fixtures"
FOLDERS = FIXTURES / "run_folders"
TARGET = ROOT / "proof" / "results" / "old-folders.json"
DEADLINE_S = 300.0
NORMS = frozenset(
    f"optimizer.blocks.0.{norm}.weight.{moment}"
    for norm in ("attention_norm", "mlp_norm")
    for moment in ("exp_avg", "exp_avg_sq")
)
RESPLIT = {"tp": NORMS, "tp-fsdp": NORMS}
"""A model of one block, which these folders have, is split by its parts since 46899691: some of its
gradients are summed in another order (4e-16 in the last checkpoint's moments)."""


def resume(source: Path, name: str) -> dict[str, Any]:
    """What the source in a folder makes of the steps that are left of a run."""
    with tempfile.TemporaryDirectory() as fresh:
        here = Path(fresh)
        shutil.copytree(FOLDERS / "tokens", here / "tokens")
        shutil.copytree(FOLDERS / "runs" / name, here / "runs" / "run")
        environ = {
            **os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1",
            "SHOAL_CACHE": str(here / "cache"),
        }  # fmt: skip
        words = ["-m", "shoal", "train", "--resume", "runs/run"]
        if name == "own-loop":
            shutil.copy(FIXTURES / "own_loop.py", here)
            (here / "runs" / "run").rename(here / "runs" / name)
            words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            words += ["own_loop.py", "losses.json"]
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=here, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        if name == "own-loop":
            (here / "runs" / name).rename(here / "runs" / "run")
        return trained(here, ended)


def differs_in(old: dict[str, Any], new: dict[str, Any], names: frozenset[str] | None) -> bool:
    """Return whether two results differ in the hashes of some tensors of `names` alone."""
    if names is None or new["code"]:
        return False
    found = {name for name in old["hashes"] if old["hashes"][name] != new["hashes"].get(name)}
    others = {key: value for key, value in old.items() if key != "hashes"}
    same = others == {key: value for key, value in new.items() if key != "hashes"}
    return same and old["hashes"].keys() == new["hashes"].keys() and bool(found) and found <= names


def main() -> int:
    """Compare the folders that the command line names, all of them without a name."""
    names = sys.argv[1:] or sorted(path.name for path in (FOLDERS / "runs").iterdir())
    rows: dict[str, str] = {}
    with Worktree(COMMIT) as before:
        for name in names:
            old, again = (resume(before(), name) for _ in range(2))
            new = resume(ROOT, name)
            rows[name] = verdict(old, again, new) if not old["code"] else f"ended: {old}"
            if rows[name].startswith("changed") and differs_in(old, new, RESPLIT.get(name)):
                rows[name] = "equal to rounding: moments of norms in a model of one block"
            print(f"{name}: {rows[name]}", flush=True)
    counts = dict(Counter(text.split(":")[0] for text in rows.values()))
    if not sys.argv[1:]:
        record = {"commit": COMMIT, "source": source_hash(), "machine": machine(), "rows": rows}
        TARGET.write_text(json.dumps({**record, "counts": counts}, indent=1) + "\n")
    print(counts)
    return int(not set(counts) <= {"equal", "equal to rounding"})


if __name__ == "__main__":
    sys.exit(main())
