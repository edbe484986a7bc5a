"""Statistics of tensors under many layouts beside one process, and what such a step costs.

    python tests/proof/statistics_rows.py [--only NAME]

Each row trains three models of tests/worlds/statistics_case.py in float64 on a layout of two or four processes,
and compares every number of statistics.jsonl with that of one process: at most 1e-12 of the largest
number of its kind under SGD, 1e-10 under AdamW (design §6). Then a larger model trains in one process:
CPU seconds of a step with statistics over those of a step without, medians of forty pairs; at most 1.5.
The other steps are unchanged: a run without statistics takes its steps by turns with that run, and the
CPU seconds and Python calls of steps without statistics are compared; at most 2 % and 20 calls apart.
Results: proof/results/statistics.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "proof"), str(ROOT / "tests" / "worlds"), str(ROOT / "tests")]

from kept_rows import parser_of, versions  # noqa: E402
from source import source_hash  # noqa: E402

import statistics_case  # noqa: E402
from shoal.fabric import start_world  # noqa: E402
from worlds import Members, close_all  # noqa: E402

TARGET = ROOT / "proof" / "results" / "statistics.json"
DEADLINE_S, COST, OTHERS, OTHER_CALLS = 300.0, 1.5, 0.02, 20
WARM = 4
LAYOUTS: dict[str, tuple[int, Any, str, dict[str, Any]]] = {
    "ddp": (2, "ddp", "gpt", {}),
    "ddp of 4": (4, "ddp", "llama", {}),
    "dp": (1, "dp", "llama", {}),
    "zero1": (2, "zero1", "llama", {}),
    "zero2": (2, "zero2", "gpt", {}),
    "fsdp": (4, "fsdp", "gpt", {}),
    "hsdp": (4, "hsdp", "llama", {}),
    "fsdp, recompute": (2, "fsdp", "llama", {"recompute": "full"}),
    "fsdp, AdamW": (2, "fsdp", "llama", {"optimizer": "adamw"}),
    "tp": (2, {"tp": 2}, "gpt", {}),
    "tp of 4": (4, {"tp": 4}, "gpt", {}),
    "tp without sequence parallel": (2, {"tp": 2}, "llama", {"sequence_parallel": "off"}),
    "tp x fsdp": (4, {"tp": 2, "dp_shard": 2, "zero": 3}, "llama", {}),
    "tp x pp": (4, {"tp": 2, "pp": 2}, "gpt", {}),
    "tp, AdamW": (2, {"tp": 2}, "llama", {"optimizer": "adamw"}),
    "pp, recompute": (2, {"pp": 2}, "llama", {"recompute": "full"}),
    "pp, gpipe": (2, {"pp": 2, "schedule": "gpipe"}, "gpt", {}),
    "pp, interleaved": (2, {"pp": 2, "schedule": "interleaved"}, "deep", {}),
    "pp, zbv": (2, {"pp": 2, "schedule": "zbv"}, "deep", {}),
    "pp, dualpipe": (2, {"pp": 2, "schedule": "dualpipe"}, "deep", {}),
    "pp x ddp": (4, {"pp": 2, "dp_replicate": 2}, "llama", {}),
    "cp": (2, {"cp": 2}, "gpt", {}),
    "cp, ulysses": (2, {"cp": 2, "context": "ulysses"}, "gpt", {}),
    "cp x tp": (4, {"cp": 2, "tp": 2}, "llama", {}),
    "cp x pp": (4, {"cp": 2, "pp": 2}, "llama", {}),
    "cp x fsdp": (4, {"cp": 2, "dp_shard": 2, "zero": 3}, "llama", {}),
    "ep": (2, {"dp_shard": 2, "ep": 2}, "moe", {}),
    "ep of 4": (4, {"dp_shard": 4, "ep": 4}, "moe", {}),
    "ep x pp": (4, {"pp": 2, "dp_replicate": 2, "ep": 2}, "moe", {}),
    "offload": (2, "ddp", "llama", {"offload": "optimizer"}),
}


def compare(name: str, folder: Path, members: Any, alone: dict[Any, Any]) -> dict[str, Any]:
    """Return the row of a layout: the largest difference, and whether it is within the bound."""
    size, layout, model, policies = LAYOUTS[name]
    optimizer = policies.get("optimizer", "sgd")
    given = {"folder": str(folder / name), "layout": layout, "model": model, **policies}
    try:
        found = members(size).call("statistics_case:train", deadline_s=DEADLINE_S, **given)[0]
        if (model, optimizer) not in alone:
            place = folder / f"{model} {optimizer}"
            alone[model, optimizer] = statistics_case.train(
                start_world({}), str(place), "single", model, optimizer=optimizer
            )
        expected = alone[model, optimizer]["lines"]
        if layout == "dp":  # replicas in threads run no hooks
            expected = [{key: one[key] for key in found["lines"][0]} for one in expected]
        gaps = statistics_case.differences(found["lines"], expected)
    except Exception as failure:  # the row says so
        return {"layout": name, "equal": False, "failure": str(failure)[-600:]}
    bound = 1e-12 if optimizer == "sgd" else 1e-10
    return {
        "layout": name,
        "processes": size,
        "bound": bound,
        "equal": max(gaps.values()) <= bound,
        **gaps,
    }


def measure_cost(folder: Path, steps: int = 84) -> dict[str, Any]:
    """Return CPU seconds and calls of steps with and without statistics, of two runs by turns.

    Every second step of the first run records statistics; the second run records none. Both are in
    this process, and the two steps of a pair follow each other.
    """
    runs = [
        statistics_case.open_run(
            start_world({}), str(folder / str(every)), "single", "large", statistics=every
        )
        for every in (2, 0)
    ]
    data = statistics_case.rows()
    batches = [endless(run.loader(data)) for run in runs]
    cpu_s: list[list[float]] = [[], []]
    for step in range(steps):
        for at in (0, 1) if step % 4 < 2 else (1, 0):
            batch = next(batches[at])
            began_s = time.process_time()
            runs[at].step(batch)
            cpu_s[at].append(time.process_time() - began_s)
    # Of six further steps every second one is due. A check that is due by the clock adds to one.
    counted = [
        [count_calls(run.step, next(given)) for _ in range(6)]
        for run, given in zip(runs, batches, strict=True)
    ]
    calls = [[min(one[at::2]) for at in (0, 1)] for one in counted]
    for run in runs:
        for undo in run.program.on_close:
            undo()
    due, other = (cpu_s[0][at::2] for at in (WARM + 1, WARM))  # steps 6, 8, …: due
    without = cpu_s[1][WARM::2]
    return {
        "steps": len(due),
        "cpu_s": statistics.median(other),
        "cpu_s_with_statistics": statistics.median(due),
        "ratio": statistics.median(one / two for one, two in zip(due, other, strict=True)),
        "cpu_s_of_a_run_without": statistics.median(without),
        "others": statistics.median(one / two for one, two in zip(other, without, strict=True)),
        "calls": {"other": calls[0][0], "due": calls[0][1], "without": calls[1][0]},
    }


def endless(loader: Any) -> Iterator[Any]:
    """Yield batches of one epoch after the other."""
    while True:
        yield from loader


def count_calls(work: Any, *values: Any) -> int:
    """Return the Python calls of a function on this thread."""
    count = 0

    def add(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(add)
    try:
        work(*values)
    finally:
        sys.setprofile(None)
    return count


def main() -> int:
    """Run all rows, write them, and judge."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    worlds: dict[int, Members] = {}
    rows, alone = [], {}
    with tempfile.TemporaryDirectory(prefix="statistics-") as name:
        folder = Path(name)

        def members(size: int) -> Members:
            if size not in worlds or any(p.poll() is not None for p in worlds[size].processes):
                worlds[size] = Members(size, folder)
            return worlds[size]

        try:
            for layout in LAYOUTS:
                if asked.only in layout:
                    rows.append(compare(layout, folder, members, alone))
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            close_all(list(worlds.values()))
        cost = measure_cost(folder / "cost")
    print(json.dumps(cost))
    equal = sum(row["equal"] for row in rows)
    told = {"source": source_hash(), **versions(), "equal": f"{equal} of {len(rows)}", "cost": cost}
    if not asked.only:
        TARGET.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    calls = cost["calls"]
    same = (
        abs(cost["others"] - 1) <= OTHERS and abs(calls["other"] - calls["without"]) <= OTHER_CALLS
    )
    return 0 if equal == len(rows) and cost["ratio"] <= COST and same else 1


if __name__ == "__main__":
    sys.exit(main())
