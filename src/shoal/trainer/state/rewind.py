"""Goes back to the last checkpoint where weights are damaged, and leaves out what led there.

One step that leaps out is its samples' fault, and is skipped (`skipped_steps.py`). At the third in
a row it is the weights that are damaged: `shoal train` goes back to its last checkpoint and leaves
out all samples from there to this step, once. The others of the stream follow as they would; what
was left out is part of the loader's state, so checkpoints keep it.

Source: PaLM goes back some hundred steps and leaves some hundred batches out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shoal.base.errors import TrainingError
from shoal.data.loading.step_samples import StepBatch
from shoal.trainer.step.skipped_steps import Skips, Spikes

if TYPE_CHECKING:
    from shoal.fabric import World
    from shoal.trainer.loaders.run_loaders import Feed
    from shoal.trainer.metrics_recorder import Recorder

IN_A_ROW = 3
"""Steps that leap out after which a run goes back: bad samples alone seldom come so close."""


class Rewound(Protocol):
    """What of a `Run` goes back."""

    feed: Feed
    recorder: Recorder
    skips: Skips
    spikes: Spikes
    step_count: int

    @property
    def world(self) -> World:
        """The processes."""

    def restore(self) -> bool:
        """Go on from the newest checkpoint; False without one."""


def go_back(run: Rewound, spike: str, batch: Any) -> bool:
    """After steps of `shoal train` that leapt out: undo what led to it, if that is asked for.

    Every rank calls it. Where there is no checkpoint, or data has no places to go back to, the step
    stays skipped.

    Returns:
        whether the run went back, so that the loader begins anew.

    Raises:
        TrainingError: on all ranks, once an epoch was left out since one checkpoint.
    """
    if not spike or run.spikes.mode != "rewind" or not isinstance(batch, StepBatch):
        return False
    if run.skips.in_a_row < IN_A_ROW:
        return False
    step = run.step_count
    if not run.feed.can_leave_out(batch) or not run.restore():
        return False
    first, epoch = run.feed.leave_out(batch)
    told = {"to": run.step_count, "left_out": [first, batch.next_position], "reason": spike}
    if run.world.keeps:
        run.recorder.events.emit("rewound", step=step, **told)
    if batch.next_position - first > epoch:
        raise TrainingError(
            f"step {step}: {spike}; so were others after step {run.step_count}, to which the run "
            f"goes back, until samples {first} – {batch.next_position} of the stream, more than an "
            f"epoch, were left out: look at the data, or lower optimizer.lr"
        )
    return True
