"""Verdicts on three costs that only a device has: small kernels, products in fp32, needless recompute.

Each cost is planted in a run of its own process, whose folder then gets its verdict. The cure runs
too, in few steps, so that the step foretold stands beside the step measured. Where there is no
`nvidia-smi`, a program in its place reports what the planted cost would show, so that a CPU and a
simulated device run the same lines. In MIG mode a device reports no utilisation: then the verdict
can name recompute alone, and the row says so.

    python tests/cuda/gpu_verdicts.py NAME FOLDER SECONDS     one run, of at least so many seconds
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from child import Sheet
from device import DEVICE, ON_GPU, PATIENCE, SMALL, pick
from one import Tokens
from shoal.base.layouts.policies import OptimizerPolicy
from shoal.models.catalog import build
from shoal.optim.build import build_optimizer
from shoal.report.verdict import Verdict, find_verdict
from shoal.report.verdict.run_facts import read_run_facts
from shoal.report.verdict.run_verdict import read_replay

SIZE = pick({"dim": 1024, "layers": 8, "heads": 16}, {"dim": 64, "layers": 2, "heads": 4})
SEQUENCE, BATCH, VOCABULARY = pick(1024, 32), pick(8, 2), 512
OPERATIONS, BLOCKS, WIDTH = pick(200, 100), 4, 64
PLANTED_S, LEAST_STEPS = pick(32.0, 2.0), 45
"""Seconds of a planted run, in which `nvidia-smi` is asked every ten · steps of any run."""
RECORDED_S = 30.0
"""Seconds for the watchdog to write the last steps, and to end."""


@dataclass(frozen=True)
class Cause:
    """A planted cost.

    name          of its run
    kind, words   of its verdict
    cured         the name of the run without it
    utilisation   in percent, as reported in the place of `nvidia-smi`
    """

    name: str
    kind: str
    words: str
    cured: str
    utilisation: int


CAUSES = (
    Cause("fp32", "compute", "products in fp32", "bf16", 97),
    Cause("recompute", "memory", "recompute (full) without need", "bf16", 97),
    Cause("small kernels", "small_kernels", "launching operations", "few kernels", 30),
)


def causes(sheet: Sheet) -> None:
    """A row for each cost: its verdict, and the step after its cure."""
    cured_s: dict[str, float] = {}
    for cause in CAUSES:
        with sheet.row(f"verdict on {cause.name}") as told, tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            verdict, utilisation = planted(cause, folder)
            told.update(utilisation=utilisation, verdict=verdict.line(), kind=verdict.kind)
            told["evidence"] = list(verdict.evidence)
            if cause.cured not in cured_s:
                cured_s[cause.cured] = step_of(run_of(cause.cured, folder / "cured", 0.0))
            told["measured_s"] = cured_s[cause.cured]
            if verdict.kind == cause.kind and verdict.without_s:
                told["foretold_s"] = verdict.without_s
                told["error"] = verdict.without_s / told["measured_s"] - 1
            told["reason"] = reason_for_another(cause, utilisation, verdict)
            if not told["reason"]:
                assert verdict.kind == cause.kind, verdict
                assert cause.words in verdict.cause


def reason_for_another(cause: Cause, utilisation: float | None, verdict: Verdict) -> str:
    """Why this machine need not show the cost; "" if it must."""
    if utilisation is None and cause.kind != "memory":
        return "the device reports no utilisation"
    if cause.kind == "compute" and not ON_GPU:
        return "a CPU has no products in bf16 that are faster"
    if SMALL and ("busy" in verdict.cause or verdict.kind == "busy_machine"):
        return "other work runs on this machine"
    return ""


def planted(cause: Cause, folder: Path) -> tuple[Verdict, float | None]:
    """The verdict on a run that has the cost, and the utilisation that it knows."""
    run = run_of(cause.name, folder / "planted", PLANTED_S, place_of_smi(folder, cause))
    facts = read_run_facts(run, [], 1)
    return find_verdict(run), facts.utilisation


def step_of(run: Path) -> float:
    """Mean seconds of a run's step after its warm-up."""
    found = read_replay(run)
    assert found is not None, f"{run}: no steps"
    return found[1].mean_s(found[1].step_s)


def place_of_smi(folder: Path, cause: Cause) -> dict[str, str]:
    """The PATH of a program that stands for `nvidia-smi`; {} where there is one."""
    if shutil.which("nvidia-smi") and not SMALL:
        return {}
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '0, made, {cause.utilisation}, 1000, 81559, 300, 60'\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def run_of(name: str, folder: Path, seconds: float, more: dict[str, str] | None = None) -> Path:
    """The folder of a run in a process of its own, once its watchdog has written all steps."""
    words = [sys.executable, str(Path(__file__).resolve()), name, str(folder), str(seconds)]
    done = subprocess.run(
        words,
        env={**os.environ, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * PATIENCE + 3 * seconds,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    last = int(done.stdout.split()[-1])
    until_s = time.monotonic() + RECORDED_S * PATIENCE
    while time.monotonic() < until_s:
        found = read_replay(folder)
        if found is not None and found[0].steps[-1] >= last - 1:
            break
        time.sleep(0.2)
    return folder


# ---- a run


class FewOrMany(nn.Module):
    """A block with a number of small operations."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.linear, self.operations = nn.Linear(WIDTH, WIDTH), operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.operations):
            x = x * 1.0001
        return x + torch.tanh(self.linear(x))


class Rows:
    """Deterministic samples of the small model."""

    draws_nothing = True

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), torch.tensor(index % WIDTH)


def model_and_data(name: str) -> tuple[nn.Module, Any]:
    """What a run of that name trains."""
    torch.manual_seed(0)
    if "kernels" in name:
        operations = OPERATIONS if name == "small kernels" else 0
        return nn.Sequential(*(FewOrMany(operations) for _ in range(BLOCKS))), Rows()
    model = build("llama", SIZE, vocabulary=VOCABULARY, sequence=SEQUENCE)
    return model, Tokens(VOCABULARY, SEQUENCE, samples=1 << 20)


def train(name: str, folder: Path, seconds: float) -> int:
    """Train for that long, and for some steps at least; gives the number of steps."""
    model, data = model_and_data(name)
    run = shoal.parallelize(
        model,
        lambda p: build_optimizer(OptimizerPolicy(), p),
        layout="single",
        batch=BATCH,
        micro_batch=BATCH,
        precision="bf16" if name in ("bf16", "recompute") else "fp32",
        recompute="full" if name == "recompute" else "none",
        folder=folder,
    )
    assert run.world.device.type == DEVICE.type, run.world.device
    began_s = time.monotonic()
    for batch in run.loader(data):
        run.step(batch)
        if run.step_count >= LEAST_STEPS and time.monotonic() >= began_s + seconds:
            break
    run.close()
    return run.step_count


if __name__ == "__main__":
    steps = train(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.write(f"{steps}\n")
