"""Run folders made by a program, for the tests of `shoal watch`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from shoal.base.runlog.rank_records import FOLDER, RankStep, encode_header

BEGAN_S = 1_795_000_000.0
PLAN = {
    "layout": {"dp_replicate": 4}, "steps": 200, "unit": "tokens", "device": "cpu",
    "predicted": {"step_s": 0.2, "peak_memory_bytes": 3 << 30, "sent_bytes": 1000},
}  # fmt: skip


def step_row(step: int, **fields: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, of a loss that falls from 7."""
    return {
        "step": step, "loss": round(2 + 5 * math.exp(-step / 40), 4), "grad_norm": 1.5, "lr": 3e-4,
        "tokens": 2048, "step_s": 0.25, "tokens_per_s": 8192.0, "mfu": 0.3,
        "peak_memory_bytes": 2 << 30, "comm_bytes": 1000, "comm_exposed_s": 0.05,
        "data_wait_s": 0.01, **fields,
    }  # fmt: skip


def write_steps(folder: Path, steps: range, **fields: Any) -> None:
    """Append steps to metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(step_row(step, **fields)) + "\n" for step in steps)


def write_event(folder: Path, name: str, **fields: Any) -> None:
    """Append an event, an hour later than the start for each event before it."""
    path = folder / "events.jsonl"
    count = path.read_bytes().count(b"\n") if path.exists() else 0
    row = {"time_s": BEGAN_S + 60 * count, "event": name, "rank": None, "step": None, **fields}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rank_row(step: int, rank: int, late_s: float, slowest_s: float) -> RankStep:
    """A step of a rank that is late by some seconds, among others of which one is the slowest."""
    #          other  data           passes sum    update hooks  back  waiting
    seconds = (0.0, 0.01 + late_s, 0.05, 0.02, 0.02, 0.005, 0.1, slowest_s - late_s)
    return RankStep(step, rank, 1, BEGAN_S + step, (1 << 30) + rank, seconds)


def write_ranks(folder: Path, steps: range, late_s: dict[int, float], ranks: int = 4) -> None:
    """Append steps of all ranks to rank_steps/node-0.bin."""
    path = folder / FOLDER / "node-0.bin"
    path.parent.mkdir(exist_ok=True)
    slowest_s = max([0.0, *late_s.values()])
    rows = [
        rank_row(s, rank, late_s.get(rank, 0.0), slowest_s) for s in steps for rank in range(ranks)
    ]
    with path.open("ab") as file:
        if not file.tell():
            file.write(encode_header(0))
        file.write(b"".join(row.encode() for row in rows))


def make_run(folder: Path, steps: int = 60, **late_s: float) -> Path:
    """A run of four ranks that has made some steps; `rank_3=0.04`: the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    write_event(folder, "run_started", processes=4, resumed=False)
    write_event(folder, "notice", text="data: 3 files")
    write_event(folder, "compute_started", step=0)
    if steps:
        write_steps(folder, range(1, steps + 1))
        late = {int(key.removeprefix("rank_")): value for key, value in late_s.items()}
        write_ranks(folder, range(1, steps + 1), late)
    return folder
