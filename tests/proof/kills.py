"""Twenty kills in a row, per layout: the run must end as if nothing had happened, bit for bit.

`make proof` runs it; some minutes per layout on 2 cores. A run of 200 steps at 4 ranks is left alone,
its twin loses a random rank to SIGKILL twenty times, at random moments, some of them while the
workers are still starting. Losses, gradient norms, samples and the final weights must agree in every
bit. One of the runs has made a million steps before, whose lines it keeps. How long each kill cost, until the next committed step, is told as p50 and p99 (a machine's
figure, no gate). The result, with every kill, goes to proof/results/kills.json after every layout; what
was done with the same source stays, so it can be stopped and started again. --seed repeats one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "worlds"), str(ROOT / "tests")]

from source import source_hash  # noqa: E402

from cli_run import TOY_ARGUMENTS, CommandLine, final_hashes, trajectory  # noqa: E402

KILLS, STEPS, RANKS = 20, 200, 4
TARGET = ROOT / "proof" / "results" / "kills.json"
LONG = "ddp after a million steps"
LAYOUTS = ("ddp", "zero2", "fsdp", "hsdp", LONG)
BEFORE = 1_000_000
AGED = f"""
from toy import build
from shoal.trainer.run import Run

plain = Run.__init__

def aged(self, *given, **named):
    plain(self, *given, **named)
    self.step_count = {BEFORE}

Run.__init__ = aged
"""
"""A model's module that lets a run begin after so many steps."""
ARGUMENTS = [
    *[a for a in TOY_ARGUMENTS if not a.startswith(("train.steps", "checkpoint."))],
    f"train.steps={STEPS}",
    "checkpoint.every=2",
    f"launch.processes={RANKS}",
    f"launch.restarts={KILLS + 5}",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--fresh", action="store_true", help="forget what is done already")
    asked = parser.parse_args()
    source = source_hash()
    done = {} if asked.fresh else done_already(source)
    for layout in asked.layouts.split(","):
        if layout in done:
            continue
        print(f"{layout}, seed {asked.seed}: {KILLS} kills over {STEPS} steps at {RANKS} ranks")
        same, kills, output = one_layout(layout, random.Random(asked.seed))
        done[layout] = {
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "seed": asked.seed,
            "load_average": round(os.getloadavg()[2], 1),
            "equal": same,
            "recovery_s": quantiles(kills),
            "kills": kills,
        }
        if not all(same.values()):
            done[layout]["output"] = output.splitlines()[-60:]
            print(output[-4000:])
        write(done, source)
        print(json.dumps({layout: [same, done[layout]["recovery_s"]]}), flush=True)
    print(f"written: {TARGET.relative_to(ROOT)}")
    return 0 if all(all(one["equal"].values()) for one in done.values()) else 1


def done_already(source: str) -> dict[str, Any]:
    """Layouts that were killed with this very source, and ended as they should."""
    try:
        kept = json.loads(TARGET.read_text())
    except (OSError, ValueError):
        return {}
    if kept.get("source") != source:
        return {}
    return {name: one for name, one in kept["layouts"].items() if all(one["equal"].values())}


def write(done: dict[str, Any], source: str) -> None:
    every = [kill for one in done.values() for kill in one["kills"]]
    result = {
        "source": source,
        "ranks": RANKS,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "torch": torch_version()},
        "kills": len(every),
        "recovery_s": quantiles(every),
        "layouts": done,
    }
    TARGET.write_text(json.dumps(result, indent=1) + "\n")


def one_layout(
    layout: str, dice: random.Random
) -> tuple[dict[str, bool], list[dict[str, Any]], str]:
    """(what held, every kill, the broken run's output) of one layout."""
    arguments = [*ARGUMENTS, f"layout.strategy={layout}"]
    if layout == LONG:
        arguments = [*ARGUMENTS, "layout.strategy=ddp", "model.build=aged:build"]
        arguments.append(f"train.steps={BEFORE + STEPS}")
    if layout == "hsdp":
        arguments = [*ARGUMENTS, "layout.dp_replicate=2", "layout.dp_shard=2"]
    with tempfile.TemporaryDirectory() as quiet, tempfile.TemporaryDirectory() as noisy:
        for folder in (quiet, noisy):
            Path(folder, "aged.py").write_text(AGED)
        unbroken = CommandLine(Path(quiet), *arguments)
        code, output = unbroken.finish(900)
        if code:
            return {"the unbroken run ends": False}, [], output
        broken = with_history(Path(noisy), arguments) if layout == LONG else None
        broken = broken or CommandLine(Path(noisy), *arguments)
        kills: list[dict[str, Any]] = []
        earlier = RANKS if layout == LONG else 0
        for number in range(KILLS):
            kills.append(kill(broken, dice, number, kills[-1:], earlier))
        going_on(broken, kills[-1])
        kills[-1]["peak_mib"] = peak_mib(broken)
        code, output = broken.finish(900)
        keep_the_new_lines(broken.run)
        same = {
            "exit code": code == 0,
            "losses, gradient norms, samples": trajectory(broken.run) == trajectory(unbroken.run),
            "weights and optimizer state": final_hashes(broken.run) == final_hashes(unbroken.run),
            "deaths seen by the supervisor": len(broken.events("worker_died")) == KILLS,
        }
    for one in kills:
        del one["killed_s"]
    return same, kills, output


def quantiles(kills: list[dict[str, Any]]) -> dict[str, float]:
    """The middle one, and the one that a hundredth is above (of few: the longest).

    Where the next kill came before a step was committed, nobody knows how long this one cost.
    """
    ordered = sorted(one["recovery_s"] for one in kills if "recovery_s" in one)
    if not ordered:
        return {"count": 0}
    return {
        "count": len(ordered),
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


def kill(
    command: CommandLine,
    dice: random.Random,
    number: int,
    before: list[dict[str, Any]],
    earlier: int,
) -> dict[str, Any]:
    """Kill one random rank of the next attempt; every fourth one before it made any progress.

    before   the kill before this one, if any: is told how long it cost, where this one lets it be seen
    earlier  workers that had started before the first attempt of these
    """
    attempt_ready = earlier + (number + 1) * RANKS
    command.wait_for(lambda: len(command.events("worker_started")) >= attempt_ready, 120)
    started_s = command.events("worker_started")[-1]["time_s"]
    if number % 4 != 3:
        steps = dice.randint(1, 8)
        for one in before:
            going_on(command, one)
        command.wait_for(lambda: moved_since(command, started_s, steps))
        time.sleep(dice.random() * 0.1)
    else:
        time.sleep(dice.random() * 4)
    rank = dice.randrange(RANKS)
    step, killed_s = last_step(command), time.time()
    command.kill(rank)
    print(f"kill {number + 1}: rank {rank} after step {step}", flush=True)
    command.wait_for(lambda: len(command.events("worker_died")) > number, 60)
    during_start = number % 4 == 3
    return {"rank": rank, "after_step": step, "during_start": during_start, "killed_s": killed_s}


def going_on(command: CommandLine, killed: dict[str, Any]) -> None:
    """Wait for the first step that was committed after a kill, and note when that was."""
    command.wait_for(lambda: moved_since(command, killed["killed_s"], 1), 120)
    killed["recovery_s"] = round(time.time() - killed["killed_s"], 2)


def moved_since(command: CommandLine, started_s: float, steps: int) -> bool:
    """The attempt that started then has committed so many steps of its own."""
    begun = [e for e in command.events("compute_started") if e["time_s"] > started_s]
    return bool(begun) and last_step(command) >= begun[-1]["step"] + steps


def last_step(command: CommandLine) -> int:
    """The last step that was committed, read from the end of its file."""
    path = command.run / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        told = file.read().split(b"\n")[-2:-1]
    return int(json.loads(told[0])["step"]) if told else 0


def with_history(folder: Path, arguments: list[str]) -> CommandLine:
    """A run that was stopped after some steps, has a million lines before them, and goes on."""
    first = CommandLine(folder, *arguments)
    first.wait_for(lambda: last_step(first) >= BEFORE + 4, 120)
    first.process.send_signal(signal.SIGTERM)
    first.finish(120)
    path = first.run / "metrics.jsonl"
    own = path.read_bytes()
    line = '{{"step": {}, "loss": 1.25, "grad_norm": 0.5, "tokens": 16, "step_s": 0.01, "samples": []}}\n'
    with path.open("w") as file:
        file.writelines(line.format(step) for step in range(1, BEFORE + 1))
    with path.open("ab") as file:
        file.write(own)
    return CommandLine(folder, *arguments, "--resume", str(first.run))


def keep_the_new_lines(run: Path) -> None:
    """Drop the history from metrics.jsonl: what is compared are the steps that were made."""
    path = run / "metrics.jsonl"
    made = [line for line in path.read_text().splitlines() if json.loads(line)["samples"]]
    path.write_text("".join(f"{line}\n" for line in made))


def peak_mib(command: CommandLine) -> dict[str, int]:
    """What the launcher and rank 0 held at most, of resident memory."""
    found = {}
    for name, process in (("launcher", command.process.pid), ("rank 0", command.pids()[0])):
        told = Path(f"/proc/{process}/status").read_text().split("VmHWM:")[1]
        found[name] = int(told.split()[0]) // 1024
    return found


def torch_version() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    sys.exit(main())
