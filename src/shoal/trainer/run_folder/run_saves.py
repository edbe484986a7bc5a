"""How a run saves without stopping: begins a save, hears how it ended, and tells every rank.

    save now and then    `start`; the step's all-reduce carries `report`, so that all ranks know of
                         a failure at the same step, and then all call `settle`
    save and wait        `save`: the last one of a run, or on request
    before restoring     `settle`: what is still being written must not be taken for a leftover

A failed save is an event and a warning; the run is worth more than one checkpoint. Every rank makes
the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.errors import CheckpointError
from shoal.base.runlog.events import Emit
from shoal.fabric import World
from shoal.wire.phases import phase

if TYPE_CHECKING:  # runs that save nothing do without these rooms
    from shoal.checkpoint.save.background_save import BackgroundSaver, Outcome
    from shoal.checkpoint.save.write import Piece, Saved

NOTHING, DONE, FAILED = 0, 1, 2
"""What `report` says: still writing or none begun; the newest is complete; it failed."""


class Saving:
    """The checkpoints of one run; the second process group is made by `prepare`, or `start`.

    Args:
        warn: shows a failure, which is an event already, to whoever sees no events; from rank 0.
    """

    def __init__(self, world: World, emit: Emit, warn: Callable[[str], None]) -> None:
        self.world = world
        self._emit = emit
        self._warn = warn
        self._saver: BackgroundSaver | None = None

    def prepare(self) -> BackgroundSaver:
        """Make the second process group now, while all ranks are here; every rank calls it.

        At the first save it would be too late: a rank that died then would be waited for in vain.
        """
        if self._saver is None:
            from shoal.checkpoint.save.background_save import BackgroundSaver
            from shoal.fabric.duplicate_group import twin

            self._saver = BackgroundSaver(twin(self.world), self._emit)
        return self._saver

    @phase("save")
    def start(
        self,
        root: Path,
        step: int,
        pieces: Sequence[Piece],
        record: dict[str, Any],
        *,
        keep: int,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """Copy the state and begin to write `root/step-N`; waits first for one in flight.

        Arguments as of `checkpoint.write.save`. Errors: ClusterError as in `settle`.
        """
        self._tell(self.prepare().start(root, step, pieces, record, keep=keep, aliases=aliases))

    @phase("save")
    def save(
        self,
        root: Path,
        step: int,
        pieces: Sequence[Piece],
        record: dict[str, Any],
        *,
        keep: int,
        aliases: Mapping[str, str] | None = None,
    ) -> Saved | None:
        """Write `root/step-N` and wait for it; None if that failed, on all ranks alike.

        Errors: ClusterError as in `settle`.
        """
        from shoal.checkpoint.save.write import save

        self.settle()
        try:
            return save(
                root, step, pieces, record, self.world, self._emit, keep=keep, aliases=aliases
            )
        except CheckpointError as failure:
            self._warn(str(failure))
            return None

    def report(self) -> int:
        """NOTHING, DONE or FAILED, of this rank's newest save, until `settle`; never waits.

        Ranks may hear a moment apart: sum `report() == FAILED` over all ranks with the step's
        numbers, and if it is not 0 call `settle` on all of them.
        """
        outcome = self._saver.poll() if self._saver is not None else None
        if outcome is None:
            return NOTHING
        return FAILED if outcome.failure is not None else DONE

    def failed(self) -> bool:
        """Tell whether this rank's newest save has failed, until `settle`; never waits."""
        return self.report() == FAILED

    @phase("finish the last save")
    def settle(self) -> Outcome | None:
        """Wait for the save in flight; its outcome, the same on all ranks, or None without one.

        Errors: ClusterError when it does not end, or this rank lost the others: the run must end.
        """
        outcome = self._saver.wait() if self._saver is not None else None
        self._tell(outcome)
        return outcome

    def close(self) -> None:
        """Settle and leave the second process group; before the world is closed, on all ranks."""
        saver, self._saver = self._saver, None
        if saver is not None:
            self._tell(saver.close())

    def _tell(self, outcome: Outcome | None) -> None:
        if outcome is not None and outcome.failure is not None:
            self._warn(str(outcome.failure))
