"""Resumes the run folders of an earlier version, in the processes of a world."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.fabric import World, start_world
from shoal.proof.start_proof import prove_run
from shoal.trainer import main_job
from shoal.trainer.run_folder import resume_checks

FIXTURES = Path(__file__).parent.parent / "fixtures"


def resume(world: World, cwd: str, folder: str) -> int:
    """Train on as a rank of `shoal train --resume` does in `cwd`; gives the exit code."""
    with contextlib.chdir(cwd), strictly():
        return main_job.train(Path(folder), prove_run, world=again(world))


def resume_island(world: World, cwd: str, folder: str, index: int, count: int, at: str) -> int:
    """The same, of one island; they meet where their run.toml says."""
    return resume(world, cwd, f"{folder}/island-{index}")


def resume_own_loop(world: World, cwd: str) -> list[float]:
    """Run the loop of a user's own in `cwd`; gives the losses of the steps it makes."""
    with contextlib.chdir(cwd):
        if str(FIXTURES) not in sys.path:
            sys.path.append(str(FIXTURES))
        from own_loop import STEPS, train

        return train(STEPS, world=again(world))


def again(world: World) -> World:
    """A world of the same processes that a run may close: the next check needs this one."""
    return start_world() if world.size > 1 else world


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """As the command starts its workers; the machine need not be measured to train on."""
    measured = main_job.measure_machine
    main_job.measure_machine = lambda *_: None
    os.environ[resume_checks.STRICT] = "strict"
    try:
        yield
    finally:
        main_job.measure_machine = measured
        del os.environ[resume_checks.STRICT]
