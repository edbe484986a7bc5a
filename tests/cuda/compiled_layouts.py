"""Compiled blocks under layouts that split a block or the model: the losses of plain blocks.

On one GPU the ranks share it, and their tensors travel by way of the host (`host_group.py`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import shoal
from child import Sheet
from device import PATIENCE
from layouts import Worlds
from one import Tokens
from shoal.fabric import World
from shoal.models.catalog import build
from training_programs import compile_policy

LAYOUTS = {"tp": {"tp": 2}, "pp": {"pp": 2}, "fsdp": {"strategy": "fsdp"}}
STEPS, BOUND = 3, 1e-4
ROW_S = 50.0 * PATIENCE


def two_ranks(sheet: Sheet) -> None:
    """A row for each layout."""
    with tempfile.TemporaryDirectory() as folder:
        worlds = Worlds(Path(folder))
        for name in LAYOUTS:
            with sheet.row(f"compiled blocks under {name} × 2") as told:
                try:
                    told.update(
                        worlds(2).call("compiled_layouts:both", deadline_s=ROW_S, layout=name)[0]
                    )
                except Exception:
                    worlds.drop(2)
                    raise
                assert told["difference"] < BOUND, told
        worlds.drop(2)


def both(world: World, layout: str) -> dict[str, Any]:
    """Losses of some steps, with plain blocks and with compiled ones."""
    policy = compile_policy()
    plain, fast = (losses(world, layout, compile) for compile in ("none", policy))
    worst = max(abs(a - b) / b for a, b in zip(fast, plain, strict=True))
    return {"compile": policy, "plain": plain, "compiled": fast, "difference": worst}


def losses(world: World, layout: str, compile: str) -> list[float]:
    """Of a small Llama in fp32 under SGD, which blows no rounding up."""
    torch.manual_seed(1)
    data = Tokens(97, 32)
    run = shoal.parallelize(
        build("llama", {"dim": 64, "layers": 2, "dropout": 0.0}, vocabulary=97, sequence=32),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        layout=LAYOUTS[layout],
        batch=8,
        micro_batch=2,
        precision="fp32",
        clip=1.0,
        compile=compile,
        sample=lambda: torch.utils.data.default_collate([data[k] for k in range(3)]),
        world=world,
    )
    found = []
    for batch in run.loader(data):
        found.append(float(run.step(batch).loss))
        if len(found) == STEPS:
            break
    for undo in run.program.on_close:  # the world stays open for the next run
        undo()
    return found
