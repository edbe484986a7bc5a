"""Report, on all ranks, a step's skipped update or the samples that no retry could read.

Imported when there is something to report, and when a run reaches a limit (`skipped_steps.py`).
Every case is an event. A loop of the user's own displays no events: it prints the first case of
each kind, and the totals at its end.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.base.errors import ClusterError, TrainingError
from shoal.base.runlog.events import Emit
from shoal.base.text.event_sentences import left_out_text, skipped_text
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric import World
from shoal.trainer.step.optimizer_step import NO_TARGET

OTHERS = "; later ones are counted at the end"
"""End of a line for the first case of its kind."""

NAMED = 8
"""Largest number of ranks that a line names."""


class SkipCounts(Protocol):
    """Counters of a run (`SkipCounter`), and the limits at which it stops."""

    limit: int
    unreadable: int
    in_a_row: int
    lost: int
    last_reason: str
    skipped: int
    steps: int
    spiked: int
    any_moved: bool
    is_own_loop: bool
    are_totals_printed: bool


def report_unreadable(
    skips: SkipCounts,
    step: int,
    count: int,
    batch: object,
    world: World,
    emit: Emit,
    tell: Callable[[str], None],
) -> None:
    """Report `count` samples of a step that some ranks could not read; every rank calls it.

    The first loss of a run is also a line for the terminal, by `tell`.

    Raises:
        ClusterError: on all ranks, once more are lost than the run may leave out.
    """
    mine = batch.left_out if isinstance(batch, StepBatch) else ()
    told = world.gather_json([[one.sample, one.epoch, one.position, one.error] for one in mine])
    is_first, skips.lost = skips.lost == 0, skips.lost + count
    losses = [(rank, *one) for rank, own in enumerate(told) for one in own]
    if world.writes_files:
        for rank, sample, epoch, position, error in losses:
            found = {"sample": sample, "epoch": epoch, "position": position, "error": error}
            emit("sample_left_out", step=step, rank=rank, **found)
    if skips.lost > skips.unreadable:
        rank, sample, epoch, position, error = losses[-1]
        raise ClusterError(
            f"data.source: sample {sample} (epoch {epoch}, position {position}) on rank {rank}: "
            f"{error}; {skips.lost} samples of this run could not be read, data.unreadable = "
            f"{skips.unreadable} may be left out"
        )
    if is_first:
        rank, sample, epoch, position, error = losses[0]
        found = {"sample": sample, "epoch": epoch, "position": position, "error": error}
        tell(f"{left_out_text({'step': step, 'rank': rank, **found})}{OTHERS}")


def report_skip(
    skips: SkipCounts,
    step: int,
    reason: str,
    broken: list[int],
    batch: Any,
    world: World,
    emit: Emit,
    tell: Callable[[str], None],
    *,
    spike: bool = False,
) -> None:
    """Report a step that moved no weight; every rank calls it with its own `batch`.

    The other arguments are the same on all ranks. The first skip of a run is also a line for the
    terminal.

    Args:
        skips: the run's counters.
        step: the skipped step, from 1.
        reason: why the step was skipped.
        broken: ranks whose numbers are not finite, or whose samples the event names.
        batch: this rank's batch.
        world: all ranks.
        emit: writes an event.
        tell: prints a line.
        spike: loss and norm are finite, and a spike.

    Raises:
        TrainingError: on all ranks, at the limit of such steps in a row.
    """
    skips.in_a_row, skips.last_reason = skips.in_a_row + 1, reason
    culprits = [m for m in world.gather_json(_describe_share(batch, world)) if m["rank"] in broken]
    skips.skipped += 1
    fields = {"reason": reason, "ranks": broken, "culprits": culprits, "in_a_row": skips.in_a_row}
    if world.writes_files:
        emit("step_skipped", step=step, **fields)
    if skips.in_a_row >= skips.limit:
        skips.are_totals_printed = True  # by this error
        where = "all ranks"
        if culprits and not spike:
            where = format_ranks([m["rank"] for m in culprits])
        raise TrainingError(
            f"step {step}: {reason} on {where}, {skips.in_a_row} steps in a row "
            f"(train.skip_limit); the weights are those of step {step - skips.in_a_row}; "
            f"{suggest_remedy(reason)}"
        )
    if skips.skipped == 1:
        tell(f"{skipped_text({'step': step, **fields})}{OTHERS}")
        if skips.is_own_loop:
            atexit.register(_print_unclosed_totals, skips, tell)


def _print_unclosed_totals(skips: SkipCounts, tell: Callable[[str], None]) -> None:
    """Print the counts of a loop that ends without `run.close`."""
    if not skips.are_totals_printed:
        tell(format_totals(skips))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return the names of some ranks as text; only the first of many.

    >>> format_ranks([3]), format_ranks([0, 1])
    ('rank 3', 'ranks 0 and 1')
    >>> format_ranks(range(4096))
    'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4088 more'
    """
    named = [str(rank) for rank in ranks[:NAMED]]
    if len(ranks) > NAMED:
        named.append(f"{len(ranks) - NAMED} more")
    *first, last = named
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def report_spike(
    skips: SkipCounts,
    step: int,
    spike: str,
    batch: Any,
    world: World,
    emit: Emit,
    tell: Callable[[str], None],
) -> None:
    """Report a spike whose update was made; every rank calls it. The first is also a line."""
    told = world.gather_json(_describe_share(batch, world))
    if world.writes_files:
        cure = {"cure": 'spikes="skip"'} if skips.is_own_loop else {}
        emit("spike", step=step, reason=spike, culprits=told, **cure)
    skips.spiked += 1
    if skips.spiked == 1:
        tell(f'step {step}: {spike}; the update was made; try: spikes="skip"{OTHERS}')


def format_totals(skips: SkipCounts) -> str:
    """Return the line that ends a run: skipped steps, spikes, unread samples; "" for none."""
    parts = []
    if skips.skipped:
        still = "" if skips.any_moved else ": no weight moved"
        parts.append(f"{skips.skipped} of {skips.steps} steps skipped{still}")
    elif skips.steps and not skips.any_moved:
        parts.append(f"{skips.steps} of {skips.steps} steps moved no weight: {skips.last_reason}")
    if skips.spiked:
        parts.append(f"{skips.spiked} of {skips.steps} steps were spikes, with their update made")
    if skips.lost:
        parts.append(f"{skips.lost} samples that could not be read were left out")
    return "; ".join(parts)


def _describe_share(batch: Any, world: World) -> dict[str, Any]:
    """Return this rank's micro-batches and samples of a step, as JSON."""
    mine: dict[str, Any] = {"rank": world.rank, "micro_batches": [], "samples": []}
    if isinstance(batch, StepBatch):
        mine["micro_batches"] = [m.index for m in batch.micro_batches]
        mine["samples"] = batch.sample_ids
    return mine


def suggest_remedy(reason: str) -> str:
    """Return advice on skipped steps: without targets, else with values that are not finite."""
    if reason == NO_TARGET:
        return "look at the data, where every target is ignored, or at the count that a loss gives"
    return "look at these samples, lower optimizer.lr, or set optimizer.clip"
