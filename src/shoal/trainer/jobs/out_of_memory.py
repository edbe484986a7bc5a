"""Handling of an out-of-memory error in a step: report a micro-batch that fits, or switch to it.

    stop    the run ends and names the nearest micro-batch; a restart would fail in the same way
    halve   every rank starts again from the last checkpoint with micro-batches of half the size (or
            the next size that divides): the batch, its samples and its loss stay, in more passes

Ranks that wait in a collective for the dead one cannot be notified in the middle of a pass. So the
rank writes a file into the run folder and dies, and the supervisor restarts all ranks, as after any
death. Later starts of the run use the halved size too. A process that the kernel kills for its
memory writes no file, and nothing is halved then.

Numbers change where they belong to a micro-batch: masks of dropout, statistics of BatchNorm, losses
that compare samples with each other. Sums over more passes are added in another order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.damaged_lines import read_object
from shoal.config.save import MICRO_BATCH, is_derived, write_derived
from shoal.planning.micro_batch_sizes import default_micro_batch, with_micro_batch

if TYPE_CHECKING:
    from shoal.base.plans.plan import Plan
    from shoal.config.sections import Config
    from shoal.trainer.run import Run

FILE = "micro_batch.json"
"""File in the run folder: the micro-batch that was too large, and the one used in its place."""

WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(failure: BaseException) -> bool:
    """Return whether an exception is an out-of-memory error, of a device or of the host."""
    if isinstance(failure, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(failure, RuntimeError) and any(w in str(failure).lower() for w in WORDS)


def largest_proper_divisor(micro_batch: int) -> int:
    """Return the largest proper divisor, which divides the batch too; 0 if there is none.

    >>> (
    ...     largest_proper_divisor(8),
    ...     largest_proper_divisor(9),
    ...     largest_proper_divisor(7),
    ...     largest_proper_divisor(1),
    ... )
    (4, 3, 1, 0)
    """
    return next((n for n in range(micro_batch // 2, 0, -1) if micro_batch % n == 0), 0)


def apply_reduced_micro_batch(
    plan: Plan, config: Config, folder: Path, *, writes: bool = False
) -> Plan:
    """Return the plan with the reduced micro-batch of an earlier start of this run.

    A `train.micro_batch` that the user has changed since wins. A micro-batch that Shoal chose
    follows the layout, but stays at most at the reduced size.

    Args:
        writes: this rank records a reduced choice of Shoal's in run.toml. Later starts, also on
            other ranks, then count from the size that was trained with.
    """
    told = read_object(folder / FILE)
    size = told.get("micro_batch")
    if not isinstance(size, int) or size < 1:
        return plan
    if is_derived(folder / "run.toml", MICRO_BATCH):
        most = min(size, plan.micro_batch)
        size = default_micro_batch(plan.layout, plan.batch, at_most=most)
        if writes and size != plan.micro_batch:
            write_derived(folder / "run.toml", "train", micro_batch=size)
        return with_micro_batch(plan, size)
    if told.get("asked") != config.train.micro_batch:
        return plan
    return with_micro_batch(plan, size)


@contextmanager
def handle_out_of_memory(run: Run, config: Config, folder: Path) -> Iterator[None]:
    """Handle out-of-memory errors of the steps of `shoal train`, on every rank.

    Raises:
        ConfigError: on the rank that ran out of memory, if the run ends.
        ClusterError: on that rank, if the run starts again. Other ranks raise what the death
            causes.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
        reason = str(failure).strip().splitlines()[:1] or ["no memory"]
        used = run.plan.micro_batch
        size = largest_proper_divisor(used)
        where = f"rank {run.world.rank}, step {run.step_count + 1}: {reason[0]}"
        if config.train.on_oom == "halve" and size:
            # Shoal's own choice was not configured: the same number, set by the user later, wins.
            chosen = is_derived(folder / "run.toml", MICRO_BATCH)
            asked = None if chosen else config.train.micro_batch
            kept = {"asked": asked, "micro_batch": size, "was": used, "because": where}
            with suppress(OSError):  # then the next start runs out of memory again
                write_atomically(folder / FILE, json.dumps(kept))
            told = (
                f"{where}; on from the last checkpoint with train.micro_batch={size} in the place "
                f"of {used} on all ranks (train.on_oom=halve): the same batch in more passes; "
                f"masks of dropout and statistics of BatchNorm, which belong to a micro-batch, "
                f"are others"
            )
            run.recorder.events.emit("notice", step=run.step_count, text=told)
            lost = ClusterError(told)
            lost.here = True
            raise lost from failure
        from shoal.forecast.search.memory_suggestions import smaller_settings_text

        how = ", train.on_oom=halve to have that done by itself" if size else ""
        raise ConfigError(
            f"train.micro_batch = {used}: {where}; try: "
            f"{smaller_settings_text(run.plan, size)}{how}"
        ) from failure
