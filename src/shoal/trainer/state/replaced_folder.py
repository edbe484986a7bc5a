"""End of a run whose folder was moved away and replaced by another one.

    a step's row     the rank that writes the folder notices it (`MetricsRecorder.recreate_folder`)
    next step        the step's all-reduce carries it: all ranks save, and end with one line
    a save           ranks agree before anything is written
    the run's end    checkpoints deleted since the last save are saved again (`save_if_deleted`)

The last weights go to the new path of the run's folder, if it is a sibling of the old path; else
into a new folder next to it, with the files that a resume needs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Protocol

from shoal.base.errors import ConfigError, ShoalError
from shoal.base.runlog.folder_owner import FolderOwner
from shoal.trainer.guards.guard import Guard
from shoal.trainer.state.run_state import CheckpointedRun, save_run
from shoal.trainer.step.step_vector import StepNumbers

ENTRY = "folder_replaced"


class SavingRun(CheckpointedRun, Protocol):
    """A run that writes checkpoints."""

    def save(self) -> Path | None:
        """Write a checkpoint of this step; None if that failed."""


class RunFolderGuard(Guard):
    """Guard that detects a run folder which was moved away and replaced by another one."""

    def __init__(self, run: CheckpointedRun) -> None:
        self.run = run

    def sums(self, step: int) -> Mapping[str, Sequence[float]]:
        """Return 1 if this rank saw another folder."""
        return {ENTRY: [float(self.run.recorder.replaced)]}

    def agree(self, step: int, numbers: StepNumbers) -> None:
        """Save the last weights and end the run if a rank saw another folder.

        Raises:
            ConfigError: the same on all ranks, after the save.
        """
        if numbers.sums(ENTRY)[0]:
            end_in_own_folder(self.run)


def save_in_own_folder(run: CheckpointedRun, folder: Path, *, tag: str, wait: bool) -> Path | None:
    """Check that the run's folder is its own, then call `save_run`; every rank calls it.

    Raises:
        ConfigError: the run's folder was replaced by another one.
    """
    recorder = run.recorder
    with suppress(OSError):  # the save itself says why its folder cannot be made
        recorder.recreate_folder()
    if folder == recorder.folder and not run.program.world.all_true(not recorder.replaced):
        end_in_own_folder(run)
    return save_run(run, folder, tag=tag, wait=wait)


def save_if_deleted(run: SavingRun, saved: Path | None) -> Path | None:
    """Return the run's last checkpoint; save it again if it was deleted. Every rank calls it.

    Raises:
        ConfigError: the run's folder was replaced by another one.
    """
    deleted = False
    if run.recorder.world.writes_files:
        with suppress(OSError):  # the save itself says why its folder cannot be made
            deleted = run.recorder.recreate_folder()
        deleted = deleted or (saved is not None and not saved.is_dir())
    return saved if run.recorder.world.all_true(not deleted) else run.save()


def end_in_own_folder(run: CheckpointedRun) -> NoReturn:
    """Save the last weights into this run's own folder, and end the run; every rank calls it.

    Raises:
        ConfigError: always.
    """
    recorder, world = run.recorder, run.program.world
    before = recorder.folder
    places = world.gather_json(_resolve_own_folder(run) if world.writes_files else "")
    here = Path(places[world.keepers[world.rank] if world.keepers else 0])
    recorder.folder, recorder.replaced = here, False
    recorder.owner = recorder.events.owner = FolderOwner(here)
    recorder.events.path = here / "events.jsonl"
    saved = None
    if run.step_count:
        with suppress(ShoalError):
            saved = save_run(run, here, tag="", wait=True)
    why = (
        f"{before}: another folder lies there since step {run.step_count}, and this run wrote "
        f"nothing into it; its own is {here}"
    )
    command = f"shoal train --resume {here}"
    near = command if os.environ.get("SHOAL_RUN_FOLDER") else f'folder="{here}" and run.restore()'
    if saved is None:
        raise ConfigError(f"{why}, without the steps since its last checkpoint; try: {near}")
    raise ConfigError(f"{why}, with the weights of step {run.step_count}; try: {near}")


def _resolve_own_folder(run: CheckpointedRun) -> str:
    """Return the present path of this run's folder; make a new folder if it exists nowhere."""
    owner, before = run.recorder.owner, run.recorder.folder
    if owner is None or before is None:
        return str(before)
    if not run.recorder.replaced:
        return str(before)
    if (moved := owner.find_moved_folder()) is not None:
        return str(moved)
    number = 2
    while (fresh := before.with_name(f"{before.name}-{number}")).exists():
        number += 1
    owner.fill(fresh)
    return str(fresh)
