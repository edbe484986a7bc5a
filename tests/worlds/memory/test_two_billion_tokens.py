"""Three steps on two billion tokens end soon: a validation reads a bounded part of what is held out."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TOKENS = 2_000_000_000
MOST_CPU_S = 30.0
NOTING = '''
import json, os, resource

class Noting:
    """Writes down this process's CPU seconds after each step."""
    def __init__(self, folder):
        pass
    def __call__(self, event):
        if event["event"] == "step":
            used = resource.getrusage(resource.RUSAGE_SELF)
            with open("after.jsonl", "a") as file:
                file.write(json.dumps([event["step"], used.ru_utime + used.ru_stime]) + chr(10))
'''


def write_sparse(path: Path) -> None:
    """A file of 4 GB of token 0, of which the disk holds a header alone."""
    header = {"descr": "<u2", "fortran_order": False, "shape": (TOKENS,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 2 * TOKENS)


@pytest.mark.proof("share")
def test_what_follows_the_last_step_is_short(tmp_path: Path) -> None:
    """All that the command's processes use but what the worker had used by its last step."""
    (tmp_path / "tokens").mkdir()
    write_sparse(tmp_path / "tokens" / "train.npy")
    (tmp_path / "tokens" / "meta.json").write_text('{"vocabulary": 256}')
    (tmp_path / "noting.py").write_text(NOTING)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [
        *("data.source=tokens:tokens", "data.sequence=64", "data.validation=0.02"),
        *("model.dim=32", "model.layers=2", "model.heads=2", "train.steps=3", "run.name=run"),
        *("launch.processes=1", "train.prove=off", "train.on=['noting:Noting']"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", *words], cwd=tmp_path, capture_output=True,
        text=True, timeout=900, env={**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    all_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = [json.loads(line) for line in (tmp_path / "after.jsonl").read_text().splitlines()]
    assert [step for step, _ in rows] == [1, 2, 3]
    print(f"{all_s:.1f} CPU s in all, {rows[-1][1]:.1f} of them by the last step")
    assert all_s - rows[-1][1] <= MOST_CPU_S, done.stdout
    events = (tmp_path / "runs/run/events.jsonl").read_text()
    assert "64 of 624999 held-out samples" in events, events
