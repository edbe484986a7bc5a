"""Parameter servers that do not wait: bounds, digits, deaths and the pace that was foreseen.

    python tests/proof/servers.py [bound | pace | digits | equality | deaths …] [--out proof/results/servers.json]

    bound    10,000 steps with one worker 4 × as slow (planned sleeps): the largest staleness of all
             rows of metrics.jsonl, beside layout.staleness
    pace     steps per second with a slow worker, beside what forecast/time/server_costs.py foresaw of the
             planned times, for a bound and without one
    digits   held-out accuracy of the digits, asynchronous with 4 workers beside ddp, three seeds,
             as many steps of as many samples
    equality the synchronous server against one process by design §6, float64, every case of the
             battery (unequal counts, accumulation, tied and frozen weights, dropout), 2 and 4
             ranks, one and two servers, SGD and AdamW
    deaths   SIGKILL of a worker and of the server in each mode: did the run end well, were all
             samples used by one step each

Every row is a run of the real `shoal train`. Rows are kept: one that is asked for again replaces its
own part of the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "worlds")]

import torch  # noqa: E402

import served_case as case  # noqa: E402
import trajectory  # noqa: E402
from cli_run import CommandLine, lines  # noqa: E402
from shoal.forecast.time.server_costs import simulate_pace  # noqa: E402
from worlds import Members  # noqa: E402

LONG_S = 560.0


def bound(folder: Path) -> dict[str, Any]:
    """10,000 steps under a bound, one worker 4 × as slow."""
    command = case.start(
        folder, "launch.processes=4", "layout.updates=bounded-stale", "layout.staleness=4",
        "train.steps=10000", "checkpoint.every=2500", "model.sleep_s=0.01", "launch.restarts=0",
    )  # fmt: skip
    code, output = command.finish(LONG_S)
    assert code == 0, output
    told = case.staleness(command.run)
    rows = [row["metrics"]["staleness"] for row in lines(command.run / "metrics.jsonl")]
    return {
        "steps": len(rows), "bound": told["bound"], "largest": max(rows),
        "above": sum(late > told["bound"] for late in rows), "counts": told["counts"],
        "by_worker": told["by_worker"], "samples_each_once": case.each_once(command.run, 10000),
    }  # fmt: skip


def paced(folder: Path, sleep_s: float = 0.25) -> dict[str, Any]:
    """Steps per second with one worker 4 × as slow, by what workers of equal speed took.

    What a step takes beside the planned sleep is taken from a run of equal workers.
    """
    even = _rate(folder / "even", "layout.updates=asynchronous", sleep_s, slow=1)
    beside_s = 3 / even - sleep_s
    each = [4 * sleep_s + beside_s, sleep_s + beside_s, sleep_s + beside_s]
    rows = []
    for staleness in (0, 4, 8):
        bounded = f"layout.updates=bounded-stale layout.staleness={staleness}"
        words = bounded if staleness else "layout.updates=asynchronous"
        measured = _rate(folder / str(staleness), words, sleep_s)
        foreseen = simulate_pace(each, bound=staleness or None, steps=STEPS).steps_per_s
        rows.append({
            "staleness": staleness or None, "foreseen_per_s": foreseen,
            "measured_per_s": measured, "off": measured / foreseen - 1,
        })  # fmt: skip
    return {"even_per_s": even, "beside_s": beside_s, "worker_s": each, "rows": rows}


STEPS = 120


def _rate(folder: Path, words: str, sleep_s: float, slow: int = 4) -> float:
    """Steps per second of a run, the first 20 left out."""
    command = case.start(
        folder, "launch.processes=4", *words.split(), f"train.steps={STEPS}", f"model.slow={slow}",
        "checkpoint.every=1000", f"model.sleep_s={sleep_s}", "launch.restarts=0",
    )  # fmt: skip
    code, output = command.finish(LONG_S)
    assert code == 0, output
    rows = lines(command.run / "metrics.jsonl")[20:]  # the first ones warm up
    return len(rows) / sum(row["step_s"] for row in rows)


DIGITS = [
    "model.name=mlp", "data.source=digits", "train.batch=32", "train.micro_batch=8",
    "train.steps=500", "train.prove=off", "checkpoint.every=500", "launch.restarts=0",
]  # fmt: skip


def digits(folder: Path) -> list[dict[str, Any]]:
    """Accuracy in percent, by seed."""
    layouts = {
        "ddp": ("layout.strategy=ddp", "launch.processes=2"),
        "asynchronous": (
            "layout.strategy=parameter-server", "layout.updates=asynchronous", "launch.processes=5",
        ),
    }  # fmt: skip
    found = []
    for seed in range(3):
        row: dict[str, Any] = {"seed": seed}
        for name, words in layouts.items():
            place = folder / f"{name}-{seed}"
            place.mkdir(parents=True)
            command = CommandLine(place, *DIGITS, *words, f"train.seed={seed}")
            code, output = command.finish(LONG_S)
            assert code == 0, output
            row[name] = 100 * command.events("validated")[-1]["accuracy"]
            if name == "asynchronous":
                told = case.staleness(command.run)
                row |= {"mean": told["mean"], "largest": told["largest"]}
        found.append({**row, "points": row["asynchronous"] - row["ddp"]})
    return found


def equality(folder: Path) -> list[dict[str, Any]]:
    """The verdict of every rank, and the largest distances of all steps."""
    found = []
    for size, servers in ((2, 1), (4, 1), (4, 2)):
        members = Members(size, folder)
        for name in trajectory.CASES:
            told = members.call(
                "trajectory:prove", case=name, layout="parameter-server", servers=servers
            )
            largest = [one["largest"] for one in told[0]["trajectories"]]
            found.append({
                "ranks": size, "servers": servers, "case": name,
                "verdicts": sorted({one["verdict"] for one in told}),
                "largest": {key: max(one[key] or 0.0 for one in largest) for key in largest[0]},
            })  # fmt: skip
        members.end()
    return found


def deaths(folder: Path) -> list[dict[str, Any]]:
    """SIGKILL of rank 0, a worker, and of rank 2, the server, in each mode."""
    found = []
    for updates in ("synchronous", "bounded-stale", "asynchronous"):
        for victim, who in ((0, "worker"), (2, "server")):
            command = case.start(
                folder / f"{updates}-{who}", "launch.processes=3", f"layout.updates={updates}",
                "train.steps=60", "checkpoint.every=10", "model.sleep_s=0.02", "model.slow=1",
                *(["train.micro_batch=4"] if updates == "synchronous" else []),
            )  # fmt: skip
            command.wait_for(lambda ready=command: ready.steps() >= 25)
            command.kill(victim)
            code, output = command.finish(LONG_S)
            found.append({
                "updates": updates, "victim": who, "status": code,
                "left_out": [event["rank"] for event in command.events("worker_left_out")],
                "restarts": len(command.events("restarting")),
                "resumed_at": [event["step"] for event in command.events("resumed")],
                "samples_each_once": case.each_once(command.run, 60),
            })  # fmt: skip
            if code:
                sys.stderr.write(output)
    return found


PARTS: dict[str, Callable[[Path], Any]] = {
    "bound": bound, "pace": paced, "digits": digits, "equality": equality, "deaths": deaths,
}  # fmt: skip


def well(part: str, told: Any) -> bool:
    """Whether a part says what the gate wants."""
    if part == "bound":
        return told["steps"] == 10000 and told["above"] == 0 and told["samples_each_once"]
    if part == "pace":
        return all(abs(row["off"]) <= 0.1 for row in told["rows"])
    if part == "digits":
        return statistics.mean(row["points"] for row in told) >= -2
    if part == "equality":
        return all(row["verdicts"] == ["equal"] for row in told)
    return all(row["status"] == 0 and row["samples_each_once"] for row in told)


def main() -> int:
    """Run the parts that are asked for, and keep what they tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "proof/results/servers.json")
    asked = parser.parse_args()
    kept = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for part in asked.parts:
        with tempfile.TemporaryDirectory() as folder:
            told = PARTS[part](Path(folder))
        kept[part] = {"well": well(part, told), "told": told}
        kept["machine"] = {"cores": os.cpu_count(), "torch": torch.__version__}
        asked.out.write_text(json.dumps(kept, indent=1) + "\n")
        sys.stdout.write(f"{part}: {'well' if kept[part]['well'] else 'NOT WELL'} {told}\n")
    return 0 if all(kept[part]["well"] for part in PARTS if part in kept) else 1


if __name__ == "__main__":
    sys.exit(main())
