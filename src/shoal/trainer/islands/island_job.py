"""Main job of an island: rounds to the end of the run, validations between them, the last save.

The rounds are those of islands that share a stream of samples (`island_loop.py`), or of owners,
whose data stay where they are (`owner_rounds.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.base.errors import UNSAVED_CODE, ShoalError
from shoal.config.sections import Config
from shoal.data.sources import Source
from shoal.fabric.islands.inter_island_group import IslandLost
from shoal.trainer.islands.island_data import check_same_data
from shoal.trainer.islands.island_join import IslandConnection, check_agreement
from shoal.trainer.islands.island_loop import IslandRounds
from shoal.trainer.islands.owner_rounds import open_owner_rounds
from shoal.trainer.jobs.replayed_steps import ReplayedSteps, ReplayEnd
from shoal.trainer.jobs.run_end import emit_run_end
from shoal.trainer.jobs.validation import make_validator
from shoal.trainer.run import Run
from shoal.trainer.state.replaced_folder import save_if_deleted

STOPPED = 143
"""Exit code of a run that stopped on request and saved: not finished, resume it."""


def train_rounds(
    run: Run,
    joined: IslandConnection,
    source: Source,
    config: Config,
    total_steps: int,
    replayed: ReplayedSteps | None = None,
) -> int:
    """Train rounds to the end, or to a stop; return the exit code.

    Args:
        total_steps: inner steps of an island of full speed.
        replayed: observe each step, and stop after the last of them; None: train to the end.

    Raises:
        ClusterError: an island is lost.
        TrainingError: changes are refused, or no step of this island moved a weight.
    """
    if joined.policy.changes_members and replayed is None:
        from shoal.trainer.islands.member_job import train_members

        return train_members(run, joined, source, config, total_steps)
    every = config.train.validate_every
    agreed = {"train.steps": total_steps, "train.validate_every": every}
    if joined.policy.owned:  # whose epochs are of unequal length
        agreed |= {"train.steps": config.train.steps, "train.epochs": config.train.epochs}
    check_agreement(joined.plane, agreed)
    rounds, validate = _open_rounds(run, joined, source, config, total_steps)
    if replayed is not None:
        return _repeat_rounds(run, joined, rounds, replayed)
    began_s = time.perf_counter()
    try:
        rounds.save_start()
        while joined.common.round < rounds.last and rounds.has_work:
            done = joined.common.round * rounds.round_steps
            merge = rounds.one()
            if merge.stop and rounds.can_resume_after(merge):
                return _stop_run(run, joined)
            if every and (done + rounds.round_steps) // every > done // every:
                validate()
    except IslandLost as lost:
        named = name_lost_owners(lost, config)
        _handle_lost_island(run, joined, named)
        raise named from lost
    rounds.load_merged()  # if no round was left
    joined.common.keep()
    saved = run.save()
    # The changes of the others are merged and saved by now, so they lose nothing. But an
    # island that added nothing to it has broken data or a broken loss, whatever theirs are like.
    rounds.check_moved()
    values = validate()
    saved = save_if_deleted(run, saved)
    wall_s, steps = time.perf_counter() - began_s, run.step_count - rounds.first_step
    how = "completed" if saved else "completed; the last checkpoint could not be written"
    emit_run_end(run, source, values, steps=steps, wall_s=wall_s, how=how)
    joined.close()
    run.close()
    return 0 if saved else UNSAVED_CODE


def _repeat_rounds(
    run: Run, joined: IslandConnection, rounds: IslandRounds, replayed: ReplayedSteps
) -> int:
    """Take the inner steps up to the last step of a replay; return the exit code."""
    rounds.run_step = partial(replayed.run_step, run)
    with contextlib.suppress(ReplayEnd):
        while joined.common.round < rounds.last and rounds.has_work:
            rounds.one()
    joined.close()
    run.close()
    return STOPPED


def _open_rounds(
    run: Run, joined: IslandConnection, source: Source, config: Config, total_steps: int
) -> tuple[IslandRounds, Callable[[], Any]]:
    """Return the rounds of this island, and the validation that every island calls.

    Of islands that share a stream of samples, the first one validates for all.

    Raises:
        ConfigError: the islands' data differ, and they are no owners.
    """
    policy = joined.policy
    if policy.owned:
        return open_owner_rounds(run, joined, source, config, total_steps)
    loader = run.loader(source.train, workers=config.data.workers, collate=source.collate)
    last = -(-total_steps // policy.period)
    if policy.regions > 1:  # the last merge is one of all islands
        last = -(-last // policy.far_period) * policy.far_period
    rounds = IslandRounds(run, joined, loader, last)
    validate = make_validator(run, source, config)
    held_out = (config.data.validation, source.validation)
    data = {"data.source": (config.data.source, source.train), "data.validation": held_out}
    check_same_data(joined, data, config.data.workers)
    return rounds, validate if policy.index == 0 else joined.merger.patience.extend_next_deadline


def _stop_run(run: Run, joined: IslandConnection) -> int:
    """Wait for the save that the last round started, and close; return the exit code."""
    last = None
    with contextlib.suppress(ShoalError):  # `close` raises it again
        last = run.checkpoint_saver.wait_pending()
    saved = last is not None and last.saved is not None
    if run.world.is_first:
        trouble = "" if saved else "; the last save failed"
        how = f"stopped on request after round {joined.common.round}{trouble}"
        run.recorder.events.emit("run_finished", step=run.step_count, how=how)
    joined.close()
    run.close()
    return STOPPED if saved else UNSAVED_CODE


def name_lost_owners(lost: IslandLost, config: Config) -> IslandLost:
    """Return the error with the owners of the lost islands, if `data.owners` names them."""
    names = config.data.owners
    if not config.islands.owned or config.islands.concurrent or not names:
        return lost
    owners = ", ".join(f"island {island} is owner {names[island]}" for island in lost.islands)
    return IslandLost(f"{lost}; {owners}", lost.islands, lost.after_s)


def _handle_lost_island(run: Run, joined: IslandConnection, lost: IslandLost) -> None:
    """Finish the save in progress, and emit the event that names the lost islands."""
    with contextlib.suppress(ShoalError):
        run.checkpoint_saver.wait_pending()
    if run.world.is_first:
        run.recorder.events.emit(
            "island_lost",
            step=run.step_count,
            islands=list(lost.islands),
            after_s=lost.after_s,
            round=joined.common.round,
        )
