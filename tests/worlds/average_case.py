"""What the tests of averaged weights run on every member of a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import cases
import shoal
from shoal.fabric import World
from shoal.parallel.build.full_state import gather_weights

DECAY = 0.9


def start(world: World, layout: str, folder: Path, precision: str = "fp64") -> shoal.Run:
    """The llama case with an average of its weights."""
    return shoal.parallelize(
        cases.build("llama"),
        lambda p: torch.optim.AdamW(p, lr=0.003),
        cases.loss("llama"),
        layout,
        batch=cases.BATCH,
        micro_batch=cases.MICRO_BATCH,
        precision=precision,
        average=DECAY,
        seed=3,
        world=world,
        folder=folder,
    )


def end(run: shoal.Run) -> None:
    """Leave the world to the next check."""
    run.checkpoint_saver.close()
    for undo in run.program.on_close:
        undo()
    if run.lease is not None:
        run.lease.release()


def train(world: World, layout: str, folder: str, precision: str = "fp64") -> dict[str, Any]:
    """Three steps, an evaluation, a save; then go on in a new run and look again."""
    run = start(world, layout, Path(folder), precision)
    loader = run.loader(cases.dataset("llama"))
    for batch in loader:
        run.step(batch)
    before = {name: t.clone() for name, t in gather_weights(run.program).items()}
    averaged = run.evaluate(cases.dataset("llama"))["loss"]
    after = gather_weights(run.program)
    same = all(torch.equal(after[name], t) for name, t in before.items())
    run.save()
    end(run)
    again = start(world, layout, Path(folder), precision)
    again.restore()
    told = {
        "averaged": averaged,
        "same": same,
        "updates": again.average.updates,
        "restored": again.evaluate(cases.dataset("llama"))["loss"],
    }
    again.average = None
    told["plain"] = again.evaluate(cases.dataset("llama"))["loss"]
    end(again)
    world.barrier()
    return told
