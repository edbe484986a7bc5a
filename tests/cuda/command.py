"""`shoal train` as a command on devices: a whole run, a kill that it survives, a resume."""

from __future__ import annotations

import tempfile
from pathlib import Path

from child import Sheet
from cli_run import CommandLine, lines, trajectory
from device import GPUS, PATIENCE, SMALL, pick

STEPS, EVERY, KILL_AFTER = pick((120, 10, 12), (8, 2, 3))  # a GPU is done before a kill lands
WORDS = [
    "data.source=synthetic",
    f"model.dim={pick(256, 32)}",
    "model.layers=2",
    f"data.sequence={pick(256, 16)}",
    f"train.steps={STEPS}",
    "train.batch=16",
    f"checkpoint.every={EVERY}",
    "optimizer.warmup_steps=2",
    "precision.compute=fp32",  # atomic additions differ from run to run, and bf16 makes them large
]


def command(sheet: Sheet) -> None:
    """As many processes as there are GPUs, two at least on the CPU."""
    processes = max(1, GPUS) if GPUS else 2
    words = [*WORDS, f"launch.processes={processes}"]
    with tempfile.TemporaryDirectory() as quiet, tempfile.TemporaryDirectory() as noisy:
        whole = None
        with sheet.row("a whole run") as told:
            whole = CommandLine(Path(quiet), *words)
            code, output = whole.finish(100 * PATIENCE)
            told["processes"], told["output"] = processes, output.splitlines()[-16:]
            assert code == 0, output[-3000:]
            steps = lines(whole.run / "metrics.jsonl")
            told["losses"] = [row["loss"] for row in steps]
            assert len(steps) == STEPS
        with sheet.row("a killed run ends with the same losses") as told:
            broken = CommandLine(Path(noisy), *words)
            broken.wait_for(lambda: broken.steps() >= KILL_AFTER, 90 * PATIENCE)
            broken.kill(processes - 1)
            code, output = broken.finish(100 * PATIENCE)
            told["deaths"] = len(broken.events("worker_died"))
            assert code == 0, output[-3000:]
            assert told["deaths"] >= 1 or SMALL, "nobody died"
            ours, theirs = trajectory(broken.run), trajectory(whole.run)
            told["difference"] = max(abs(a[1] - b[1]) for a, b in zip(ours, theirs, strict=True))
            assert told["difference"] < 1e-3, told["difference"]
        with sheet.row("a resumed run goes on"):
            more = STEPS + 2
            again = CommandLine(Path(quiet), "--resume", str(whole.run), f"train.steps={more}")
            code, output = again.finish(90 * PATIENCE)
            assert code == 0, output[-3000:]
            assert again.steps() == more
