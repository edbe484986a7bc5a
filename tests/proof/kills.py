"""Twenty kills in a row: the run must end as if nothing had happened, bit for bit.

`make proof` runs it; a few minutes on 2 cores. One run of 200 steps at 4 ranks is left alone, its
twin loses a random rank to SIGKILL twenty times, at random moments, some of them while the workers
are still starting. Losses, gradient norms, samples and the final weights must agree in every bit.
The result, with every kill, goes to docs/proof/kills.json. Start it again with --seed to repeat one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "worlds"))

from cli_run import TOY_ARGUMENTS, CommandLine, final_hashes, trajectory  # noqa: E402

KILLS, STEPS, RANKS = 20, 200, 4
ARGUMENTS = [
    *[a for a in TOY_ARGUMENTS if not a.startswith(("train.steps", "checkpoint."))],
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    f"launch.processes={RANKS}",
    f"launch.restarts={KILLS + 5}",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    seed = parser.parse_args().seed
    dice = random.Random(seed)
    print(f"seed {seed}: {KILLS} kills over {STEPS} steps at {RANKS} ranks", flush=True)
    with tempfile.TemporaryDirectory() as quiet, tempfile.TemporaryDirectory() as noisy:
        unbroken = CommandLine(Path(quiet), *ARGUMENTS)
        code, output = unbroken.finish(600)
        if code:
            print(output)
            return 1
        broken = CommandLine(Path(noisy), *ARGUMENTS)
        kills = [kill(broken, dice, number) for number in range(KILLS)]
        code, output = broken.finish(600)
        same = {
            "exit code": code == 0,
            "losses, gradient norms, samples": trajectory(broken.run) == trajectory(unbroken.run),
            "weights and optimizer state": final_hashes(broken.run) == final_hashes(unbroken.run),
            "deaths seen by the supervisor": len(broken.events("worker_died")) == KILLS,
        }
    result = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "seed": seed,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch_version()},
        "equal": same,
        "kills": kills,
        "output": [] if all(same.values()) else output.splitlines()[-60:],
    }
    target = ROOT / "docs" / "proof" / "kills.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(same, indent=1), f"\nwritten: {target.relative_to(ROOT)}")
    if not all(same.values()):
        print(output[-4000:])
    return 0 if all(same.values()) else 1


def kill(command: CommandLine, dice: random.Random, number: int) -> dict[str, object]:
    """Kill one random rank of the next attempt; every fourth one before it made any progress."""
    attempt_ready = (number + 1) * RANKS
    command.wait_for(lambda: len(command.events("worker_started")) >= attempt_ready, 120)
    started_s = command.events("worker_started")[-1]["time_s"]
    if number % 4 != 3:
        steps = dice.randint(1, 8)
        command.wait_for(lambda: moved_since(command, started_s, steps))
        time.sleep(dice.random() * 0.1)
    else:
        time.sleep(dice.random() * 4)
    rank = dice.randrange(RANKS)
    step = command.steps()
    command.kill(rank)
    print(f"kill {number + 1}: rank {rank} after step {step}", flush=True)
    command.wait_for(lambda: len(command.events("worker_died")) > number, 60)
    return {"rank": rank, "after_step": step, "during_start": number % 4 == 3}


def moved_since(command: CommandLine, started_s: float, steps: int) -> bool:
    """The attempt that started then has committed so many steps of its own."""
    begun = [e for e in command.events("compute_started") if e["time_s"] > started_s]
    return bool(begun) and command.steps() >= begun[-1]["step"] + steps


def torch_version() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    sys.exit(main())
