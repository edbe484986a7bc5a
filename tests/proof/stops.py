"""A stop asked for in every phase of a run: was it saved in time, or does the status say it was not?

    python tests/proof/stops.py [--only PHASE …] [--signals TERM USR1] [--out proof/results/stops.json]

Each trial is the real `shoal train` on two ranks, asked once by a signal to the launcher (or to
every process of its tree, loader workers and helpers too, as a scheduler does it) while it is

    import · proof · first step · compile (of kernels that no cache has) · step (a long one) ·
    validation · save · data (a rank waits for its samples) · round (of two islands) · tree (in
    training, with loader workers)

Right is: status 128 + signal, and the newest checkpoint is of the last step that was made (or none
was made); or status 1, and the last lines say which steps are lost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]

import psutil  # noqa: E402

from shoal.base.runlog.atomic_files import list_saved_steps  # noqa: E402

MODULE = """
import os, time, torch
from torch import nn

WAIT, AT = os.environ.get("STOPS_WAIT", ""), int(os.environ.get("STOPS_AT", "20"))
RANK = os.environ.get("RANK", "0")
if WAIT == "import":
    open("reached", "w").close()
    time.sleep(5)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)])
        self.head = nn.Linear(8, 4)
        self.passes = 0
    def forward(self, x):
        self.passes += self.training
        if WAIT == "first step":
            time.sleep(1)
        if WAIT == "proof" or (WAIT == "step" and self.passes == AT):
            open("reached", "w").close()
            time.sleep(4 if WAIT == "step" else 1.5)
        if WAIT == "validation" and not self.training:
            open("reached", "w").close()
            time.sleep(0.5)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build():
    return Net()

class Rows:
    def __init__(self, count, train):
        self.count, self.train = count, train
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        time.sleep(0.005)
        if WAIT == "data" and self.train and index == 77 and RANK == "1":
            open("reached", "w").close()
            time.sleep(3)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.tensor(index % 4)

def data():
    return Rows(200, True), Rows(80, False)

def hook(record):
    if WAIT in ("step", "tree", "round", "save") and record["event"] == "step":
        if record["step"] == 6 and WAIT in ("tree", "round"):
            open("reached", "w").close()
    if WAIT == "save" and record["event"] == "step" and record["step"] == 6:
        open("reached", "w").close()
"""
BASE = (
    "model.build=stops_toy:build", "data.source=stops_toy:data", "train.batch=8",
    "train.micro_batch=2", "train.steps=400", "checkpoint.every=50", "precision.compute=fp32",
    "train.on=stops_toy:hook", "launch.processes=2", "layout.strategy=ddp", "run.name=run",
)  # fmt: skip
OFF = ("train.prove=off",)
PHASES: dict[str, tuple[str, ...]] = {
    "import": OFF,
    "proof": (),
    "first step": OFF,
    "compile": (*OFF, "train.compile=blocks"),
    "step": OFF,
    "validation": (*OFF, "train.validate_every=10"),
    "save": (*OFF, "checkpoint.every=6"),
    "data": OFF,
    "round": (*OFF, "islands.method=diloco", "islands.count=2", "islands.period=10",
              "launch.processes=1", "layout.strategy=single"),
    "tree": (*OFF, "data.workers=2"),
}  # fmt: skip
DEADLINE_S = 180.0


def begin(words: list[str], environ: dict[str, str], folder: Path) -> Any:
    """Start `python WORD …` as a program."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def trial(phase: str, name: str, folder: Path, begin: Callable[..., Any] = begin) -> dict[str, Any]:
    """One run, asked to stop in a phase; how it ended. `begin` starts its program."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "stops_toy.py").write_text(MODULE)
    environ = {**os.environ, "STOPS_WAIT": phase, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cold")}
    environ = {k: v for k, v in environ.items() if k not in ("RANK", "WORLD_SIZE")}
    process = begin(["-m", "shoal", "train", *BASE, *PHASES[phase]], environ, folder)
    number = signal.Signals[f"SIG{name}"]
    until_s = time.monotonic() + DEADLINE_S
    while not reached(folder, phase) and process.poll() is None:
        if time.monotonic() > until_s:
            process.kill()
            return {"phase": phase, "signal": name, "wrong": "never came there"}
        time.sleep(0.01)
    asked_s = time.monotonic()
    ask(process.pid, number, tree=phase == "tree")
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    took_s = time.monotonic() - asked_s
    told = {
        "phase": phase,
        "signal": name,
        "status": process.returncode,
        "took_s": round(took_s, 1),
    }
    told |= judge(folder / "runs" / "run", process.returncode, output, number)
    if told["wrong"]:
        told["output"] = output[-1500:]
    return told


def reached(folder: Path, phase: str) -> bool:
    """Whether the run is in its phase: it says so itself, or the module does."""
    name = {"first step": '"first step"', "compile": '"compile, first step"'}.get(phase)
    if name is None:
        return (folder / "reached").exists()
    told = folder / "runs" / "run" / "phase.json"
    return told.exists() and name in told.read_text()


def ask(pid: int, number: int, *, tree: bool) -> None:
    """Signal the launcher, or all of its processes in any order."""
    for one in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)] if tree else ():
        try:
            one.send_signal(number)
        except psutil.NoSuchProcess:
            continue
    if not tree:
        os.kill(pid, number)


def judge(run: Path, status: int, output: str, number: int) -> dict[str, Any]:
    """What was made and saved, and what is wrong with the status that says so; "" nothing."""
    islands = [path for path in run.glob("island-*") if path.is_dir()]
    made, saved = 0, 0
    for folder in islands or [run]:
        lines = folder / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in lines.open()] if lines.exists() else []
        made = max([made, *steps])
        saved = max([saved, *list_saved_steps(folder)])
    all_saved = saved == made
    wrong = ""
    if status == 128 + number and not all_saved:
        wrong = f"status {status} although only step {saved} of {made} is saved"
    elif status == 1 and made and "lost" not in output:
        wrong = "status 1, and no line says what is lost"
    elif status not in (1, 128 + number):
        wrong = f"status {status}"
    elif status == 1 and all_saved and made:
        wrong = "all is saved, and the status says it is not"
    return {"made": made, "saved": saved, "wrong": wrong}


def main() -> None:
    """All phases with all signals; exit status 1 if one ended wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", nargs="*", default=list(PHASES))
    parser.add_argument("--signals", nargs="*", default=["TERM", "USR1"])
    parser.add_argument("--out", help="write what came out as JSON")
    options = parser.parse_args()
    from processes import machine
    from source import source_hash

    rows = []
    with tempfile.TemporaryDirectory() as place:
        for phase in options.only:
            for name in options.signals:
                rows.append(trial(phase, name, Path(place) / "trial"))
                print(json.dumps(rows[-1]), flush=True)
    if options.out:
        record = {"rows": rows, "source": source_hash(), "machine": machine()}
        (HERE.parents[1] / options.out).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
