"""Asynchronous saves of a run: start a save, poll its outcome, and share it with every rank.

    save now and then    `start`; the step's all-reduce carries `report`, so that all ranks know of
                         a failure at the same step, and then all call `settle`
    save and wait        `save`: the last one of a run, or on request
    before restoring     `settle`: a save in progress must not be taken for a leftover

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

if TYPE_CHECKING:  # a run without saves does not import these
    from shoal.checkpoint.save.background_save import BackgroundSaver, SaveOutcome
    from shoal.checkpoint.save.write import Piece, SavedCheckpoint

NOTHING, DONE, FAILED = 0, 1, 2
"""Results of `report`: no save, or still writing; the newest save is complete; it failed."""


class RunSaver:
    """Checkpoint saver of one run; `prepare`, or `start`, makes its second process group.

    Args:
        warn: shows a failure on the screen; the event of it is already written. Called on rank 0.
    """

    def __init__(self, world: World, emit: Emit, warn: Callable[[str], None]) -> None:
        self.world = world
        self._emit = emit
        self._warn = warn
        self._saver: BackgroundSaver | None = None

    def prepare(self) -> BackgroundSaver:
        """Make the second process group while all ranks are alive; every rank calls it.

        The first save would be too late: the ranks would wait in vain for one that died before.
        """
        if self._saver is None:
            from shoal.checkpoint.save.background_save import BackgroundSaver
            from shoal.fabric.duplicate_group import duplicate_world

            self._saver = BackgroundSaver(duplicate_world(self.world), self._emit)
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
        """Copy the state and start to write `root/step-N`; wait first for a save in progress.

        The arguments are those of `checkpoint.write.save`.

        Raises:
            ClusterError: as in `settle`.
        """
        self._warn_of_failure(
            self.prepare().start(root, step, pieces, record, keep=keep, aliases=aliases)
        )

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
    ) -> SavedCheckpoint | None:
        """Write `root/step-N` and wait for it; return None on all ranks if it failed.

        Raises:
            ClusterError: as in `settle`.
        """
        from shoal.checkpoint.save.write import save

        self.wait_pending()
        try:
            return save(
                root, step, pieces, record, self.world, self._emit, keep=keep, aliases=aliases
            )
        except CheckpointError as failure:
            self._warn(str(failure))
            return None

    def report(self) -> int:
        """Return NOTHING, DONE or FAILED for this rank's newest save, until `settle`; never wait.

        Ranks may learn of an outcome at different steps. Sum `report() == FAILED` over all ranks
        with the step's numbers, and call `settle` on all of them if the sum is not 0.
        """
        outcome = self._saver.poll() if self._saver is not None else None
        if outcome is None:
            return NOTHING
        return FAILED if outcome.failure is not None else DONE

    def failed(self) -> bool:
        """Return whether this rank's newest save has failed, until `settle`; never wait."""
        return self.report() == FAILED

    @phase("finish the last save")
    def wait_pending(self) -> SaveOutcome | None:
        """Wait for the save in progress; return its outcome, the same on all ranks, or None.

        Raises:
            ClusterError: the save does not end, or this rank lost the others: the run must end.
        """
        outcome = self._saver.wait() if self._saver is not None else None
        self._warn_of_failure(outcome)
        return outcome

    def close(self) -> None:
        """Settle and close the second process group, on all ranks, before the world is closed."""
        saver, self._saver = self._saver, None
        if saver is not None:
            self._warn_of_failure(saver.close())

    def _warn_of_failure(self, outcome: SaveOutcome | None) -> None:
        if outcome is not None and outcome.failure is not None:
            self._warn(str(outcome.failure))
