"""Losses, step time and memory of one script in DeepSpeed's calls, by DeepSpeed and by Shoal.

    python benchmarks/beside_deepspeed.py --deepspeed ENV/bin/python [--pairs 100] [--stages 0,3]

ENV is an environment of its own with torch, what Shoal needs, and deepspeed 0.19 (`DS_BUILD_OPS=0
pip install deepspeed==0.19.8`): both sides run by it, so that they have one torch. Three worlds
of two processes, one thread each, stand side by side: DeepSpeed's, Shoal's and Shoal's twin. One
takes a step while the others wait for a line on standard input: pairs in alternating order, the
slowest rank's wall-clock time and both ranks' CPU seconds, which a busy machine disturbs less.

Writes benchmarks/results/beside-deepspeed-DATE.json: raw times, losses, memory, machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_speed import LIMIT, NOISE_LIMIT, SIZES
from processes import SOURCE, machine
from ratios import ratio

HERE = Path(__file__).resolve().parent
PROCESSES, WARM_UP = 2, 3
WORLDS = ("theirs", "ours", "twin")


class World:
    """Two processes that take a step when told to."""

    def __init__(self, python: str, side: str, job: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        script = [str(HERE / "steps_of_deepspeed.py"), json.dumps(job)]
        if side != "theirs":
            script = ["-m", "shoal", "run", "--as", "deepspeed", "--", *script]
        self.ranks, self.answers = [], []
        for rank in range(PROCESSES):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES}
            told |= {"LOCAL_WORLD_SIZE": PROCESSES, "MASTER_ADDR": "127.0.0.1"}
            told |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
            told |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{SOURCE}:{HERE}"}
            read, write = os.pipe()
            words = ["bash", "-c", f'exec "$@" 3>&{write}', "bash", python, *script]
            self.ranks.append(
                subprocess.Popen(
                    words,
                    env={**os.environ, **{k: str(v) for k, v in told.items()}},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[write],
                )
            )
            os.close(write)
            self.answers.append(os.fdopen(read))

    def heard(self) -> list[dict[str, Any]]:
        """What every rank answers."""
        lines = [answer.readline() for answer in self.answers]
        if not all(lines):
            raise RuntimeError("a rank ended; its error stands above")
        return [json.loads(line) for line in lines]

    def step(self) -> list[dict[str, Any]]:
        """Let every rank take one step."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(b"\n")
            rank.stdin.flush()
        return self.heard()

    def end(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--deepspeed", required=True, help="the Python of an environment with it")
    words.add_argument("--pairs", type=int, default=100)
    words.add_argument("--stages", default="0,1,2,3")
    words.add_argument("--accumulate", type=int, default=1)
    words.add_argument("--micro-batch", type=int, default=2)
    words.add_argument("--out", type=Path)
    asked = words.parse_args()
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/beside_deepspeed.py", *sys.argv[1:]]),
        "machine": machine(),
        "stages": {},
    }
    name = f"beside-deepspeed-{time.strftime('%Y%m%d')}.json"
    path = asked.out or HERE / "results" / name
    if path.exists():
        record["stages"] = json.loads(path.read_text())["stages"]
    for stage in map(int, asked.stages.split(",")):
        record["stages"][str(stage)] = row = measured(asked, stage)
        print(stage, json.dumps({k: v for k, v in row.items() if k != "raw"}), flush=True)
        record["machine"]["load_average_after"] = machine()["load_average"]
        path.write_text(json.dumps(record) + "\n")


def measured(asked: argparse.Namespace, stage: int) -> dict[str, Any]:
    """One stage: three worlds, pair after pair."""
    job = {
        "model": SIZES["small"],
        "sequence": SIZES["small"]["sequence"],
        "config": {
            "train_micro_batch_size_per_gpu": asked.micro_batch,
            "gradient_accumulation_steps": asked.accumulate,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
            "zero_optimization": {"stage": stage},
        },
    }
    worlds = {side: World(asked.deepspeed, side, job) for side in WORLDS}
    raw: dict[str, list[Any]] = {side: [] for side in WORLDS}
    try:
        for world in worlds.values():
            world.heard()
        for step in range(WARM_UP + asked.pairs):
            for place in range(3):
                side = WORLDS[(place + step) % 3]
                raw[side].append(worlds[side].step())
    finally:
        for world in worlds.values():
            world.end()
    return {**told(raw), "raw": raw}


def told(raw: dict[str, list[Any]]) -> dict[str, Any]:
    """Ratios with their intervals, the largest difference of a loss, memory."""
    found: dict[str, Any] = {}
    for kind, over in (("wall", max), ("cpu", sum)):
        times = {s: [over(r[kind] for r in ranks) for ranks in raw[s][WARM_UP:]] for s in WORLDS}
        for name, sides in {"ours/theirs": ("ours", "theirs"), "A/A": ("ours", "twin")}.items():
            one = ratio(times[sides[0]], times[sides[1]])
            found[f"{kind} {name}"] = [round(v, 4) for v in (one.value, one.low, one.high)]
            if name == "A/A":
                found[f"{kind} noise"] = round(one.half_width, 4)
            else:
                found[f"{kind} verdict"] = one.verdict(LIMIT)
        if found[f"{kind} noise"] > NOISE_LIMIT:
            found[f"{kind} verdict"] = "open"
        found[f"{kind} medians"] = {s: sorted(t)[len(t) // 2] for s, t in times.items()}
    apart = [
        abs(a - b) / abs(a)
        for theirs, ours in zip(raw["theirs"], raw["ours"], strict=True)
        for one, other in zip(theirs, ours, strict=True)
        for a, b in zip(one["losses"], other["losses"], strict=True)
    ]
    found["losses"] = {"compared": len(apart), "largest difference": max(apart)}
    ends = {side: raw[side][-1] for side in WORLDS}
    found["peak"] = {s: max(rank["peak"] for rank in end) for s, end in ends.items()}
    found["over the start"] = {
        s: max(rank["peak"] - rank["before"] for rank in end) for s, end in ends.items()
    }
    return found


if __name__ == "__main__":
    main()
