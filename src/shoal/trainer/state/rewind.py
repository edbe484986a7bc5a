"""Return to the last checkpoint after several loss spikes, without the samples that led to them.

One step with a loss spike is the fault of its samples, and is skipped (`skipped_steps.py`). At the
third in a row the weights are damaged: `shoal train` returns to its last checkpoint and excludes
all samples from there to this step, once. The other samples of the stream follow in their order.
The loader's state holds the excluded samples, so checkpoints store them.

Source: PaLM returns by some hundred steps and excludes some hundred batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shoal.base.errors import TrainingError
from shoal.data.loading.step_samples import StepBatch
from shoal.trainer.step.skipped_steps import SkipCounter, SpikeDetector

if TYPE_CHECKING:
    from shoal.fabric import World
    from shoal.trainer.loaders.run_loaders import RunLoaders
    from shoal.trainer.metrics_recorder import MetricsRecorder

IN_A_ROW = 3
"""Spikes in a row after which a run returns: bad samples alone seldom come so close together."""


class RewindableRun(Protocol):
    """The attributes of a `Run` that a return to a checkpoint needs."""

    feed: RunLoaders
    recorder: MetricsRecorder
    skips: SkipCounter
    spikes: SpikeDetector
    step_count: int

    @property
    def world(self) -> World:
        """Return the processes of the run."""

    def restore(self) -> bool:
        """Load the newest checkpoint; return False without one."""


def rewind_run(run: RewindableRun, spike: str, batch: Any) -> bool:
    """Return to the last checkpoint after loss spikes, if spikes.mode is rewind.

    Every rank calls it. Without a checkpoint, or for data without positions, the step stays
    skipped.

    Returns:
        Whether the run went back, so that the loader starts again.

    Raises:
        TrainingError: on all ranks, if more than an epoch was excluded since one checkpoint.
    """
    if not spike or run.spikes.mode != "rewind" or not isinstance(batch, StepBatch):
        return False
    if run.skips.in_a_row < IN_A_ROW:
        return False
    step = run.step_count
    if not run.feed.can_skip_samples(batch) or not run.restore():
        return False
    first, epoch = run.feed.skip_samples(batch)
    told = {"to": run.step_count, "left_out": [first, batch.next_position], "reason": spike}
    if run.world.writes_files:
        run.recorder.events.emit("rewound", step=step, **told)
    if batch.next_position - first > epoch:
        raise TrainingError(
            f"step {step}: {spike}; so were others after step {run.step_count}, to which the run "
            f"goes back, until samples {first} – {batch.next_position} of the stream, more than an "
            f"epoch, were left out: look at the data, or lower optimizer.lr"
        )
    return True
