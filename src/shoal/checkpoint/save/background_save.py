"""Save a checkpoint in the background: the training thread copies, a second thread does the rest.

    training thread   copy this rank's share to host memory; go on
    second thread     collect, prepare, write, commit as in `write`, over a process group of its own

The ranks agree on each slice's writer once, at the first save. Afterwards every rank copies the
slices of its last save, without a message. If its offers have changed (optimizer state that
appeared later), it copies the new slices as well, and the second threads agree anew on all copies.

One save at a time: a start waits for the one before it. The verdict is the same on all ranks.
Events wait until the training thread asks (`poll`, `wait`, `start`), so listeners never run in the
second thread. A script that ends lets the save in flight finish.

Source: reliability row 24 (own group, failure on all ranks); torch's DCP async_save, whose stall on
CPU tensors is that of a whole save (0.56 of 0.59 s): ours judges the stall by the copy.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError, ClusterError, ShoalError
from shoal.base.plans.tensor_shards import Shard
from shoal.base.runlog.events import Emit
from shoal.checkpoint.agreement.assign_slices import Offer
from shoal.checkpoint.agreement.collective_phase import gather_results
from shoal.checkpoint.agreement.rank_pieces import (
    CheckpointShare,
    HeldSlice,
    Key,
    Piece,
    WriteAgreement,
    agree_on_pieces,
    agree_on_writers,
    make_offers,
    split_pieces,
)
from shoal.checkpoint.format.checkpoint_faults import RankFailed, describe_failure, short_path
from shoal.checkpoint.format.manifest import to_plain_json
from shoal.checkpoint.save.host_copy import HostCopy
from shoal.checkpoint.save.write import SavedCheckpoint, SaveTarget, save_collected
from shoal.fabric import World
from shoal.fabric.duplicate_group import destroy_duplicate

DEADLINE_S = 3600.0
"""Seconds that a training thread waits for a save that does not end, before it raises."""

NICENESS = 10
"""Niceness of the second thread, on Linux, where threads have their own: training goes first."""


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save: `saved` or `failure`; the other one is None.

    After a CheckpointError, whose text is the same on all ranks, training may go on. A ClusterError
    means that this rank lost the others: the run cannot go on.
    """

    step: int
    saved: SavedCheckpoint | None
    failure: ShoalError | None


@dataclass(frozen=True)
class _CopiedBlocks:
    """Blocks that the training thread copied to host memory, and the agreement that they follow.

    Attributes:
        shards, offers: all that this rank holds; `blocks` are those that it may have to write.
    """

    blocks: dict[Key, HeldSlice]
    shards: list[Shard]
    offers: dict[Key, Offer]
    aliases: dict[str, str]
    agreement: WriteAgreement
    changed: bool

    def matches_agreement(
        self, known: WriteAgreement | None, shards: list[Shard], aliases: dict[str, str]
    ) -> bool:
        """Return True if a new save may copy the same blocks as this one, by the agreement `known`.

        Args:
            known: the newest agreement on writers; None before the first.
            shards: this rank's shards in the new save.
            aliases: its tied name → stored name.

        Returns:
            False if the agreement, the shards or the aliases have changed since this copy.
        """
        same = self.agreement is known and not self.changed
        return same and self.shards == shards and self.aliases == aliases


@dataclass
class _PendingSave:
    """One save under way. The training thread reads it only once its future is done."""

    target: SaveTarget
    copied: _CopiedBlocks | None
    problem: Exception | None
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    outcome: SaveOutcome | None = None
    agreement: WriteAgreement | None = None
    future: Future[None] | None = None


class BackgroundSaver:
    """Saver of one run's checkpoints in a second thread, one at a time.

    Every rank has one and makes the same calls of `start`, `wait` and `close`; `poll` is local.

    Args:
        world: process group of its own (a `twin`): nothing else may use it; `close` leaves it.
        emit: called by `poll`, `wait`, `start` and `close` in their caller's thread: rank 0 emits
            `checkpoint_saved` or `checkpoint_failed`.
        deadline_s: how long `start`, `wait` and `close` wait for a save in flight before they raise
            ClusterError.
    """

    def __init__(self, world: World, emit: Emit, *, deadline_s: float = DEADLINE_S) -> None:
        self.world = world
        self.deadline_s = deadline_s
        self._emit = emit
        self._host = HostCopy()
        # One thread for all saves: starting one makes the starter wait until it runs.
        self._second = ThreadPoolExecutor(1, "shoal-saves", initializer=_lower_priority)
        self._agreement: WriteAgreement | None = None
        self._last: _CopiedBlocks | None = None
        self._running: _PendingSave | None = None
        self._outcome: SaveOutcome | None = None
        atexit.register(self._at_exit)

    def start(
        self,
        root: Path,
        step: int,
        pieces: Sequence[Piece],
        record: dict[str, Any],
        *,
        keep: int,
        aliases: Mapping[str, str] | None = None,
    ) -> SaveOutcome | None:
        """Copy the pieces and begin to write them; they may change as soon as this returns.

        Arguments as of `write.save`. A fault in them appears in the outcome, on all ranks.

        Returns:
            The outcome of the previous save, which it waits for, if nobody has read it yet.

        Raises:
            ClusterError: as in `wait`.
            ConfigError: keep < 1.
        """
        earlier = self.wait()
        save = _PendingSave(SaveTarget(root, step, {}, keep), None, None)
        try:
            save.target = replace(save.target, record=to_plain_json(record))
            save.copied = self._copy(pieces, dict(aliases or {}))
        except Exception as problem:
            # Reported in the second thread: another rank receives it in either of its threads,
            # since the first message of a save is the same exchange, whether they agree or go on.
            save.problem = problem
        self._running = save
        save.future = self._second.submit(self._write, save)
        return earlier

    def poll(self) -> SaveOutcome | None:
        """Return the newest save's outcome; None while it runs, before any, or after `wait`."""
        save = self._running
        if save is not None and save.future is not None and save.future.done():
            save.future.result()
            self._running = None
            # After a failure all ranks agree anew: their agreements must not differ.
            self._agreement = save.agreement
            self._outcome = save.outcome
            for event, fields in save.events:
                self._emit(event, **fields)
        return self._outcome

    def wait(self) -> SaveOutcome | None:
        """Wait for the save in flight and return its outcome, once; None if there is none.

        Raises:
            ClusterError: the save does not end by the deadline, or this rank lost the others.
        """
        save = self._running
        waited = [save.future] if save is not None and save.future is not None else []
        if save is not None and futures.wait(waited, self.deadline_s).not_done:
            raise ClusterError(
                f"rank {self.world.rank}: {short_path(save.target.final)} is still being written "
                f"after {self.deadline_s:g} s: a disk or another rank does not answer; older "
                f"checkpoints are as they were: start the run again"
            )
        outcome = self.poll()
        if outcome is not None and isinstance(outcome.failure, ClusterError):
            raise outcome.failure  # kept: every later call says so again
        self._outcome = None
        return outcome

    def close(self) -> SaveOutcome | None:
        """Wait for the save in flight, as `wait`, and leave the group; every rank calls it."""
        outcome = self.wait()
        atexit.unregister(self._at_exit)
        self._second.shutdown()
        self._host.free()
        destroy_duplicate(self.world)
        return outcome

    def _at_exit(self) -> None:
        """Report the last save of a script that never called `close`."""
        self.poll()
        self.world.group = None

    def _copy(self, pieces: Sequence[Piece], aliases: dict[str, str]) -> _CopiedBlocks:
        known, last, shards = self._agreement, self._last, [piece.shard for piece in pieces]
        if last is not None and last.matches_agreement(known, shards, aliases):
            sources = [block.find_data(pieces) for block in last.blocks.values()]
        else:
            sources = []
        # Nothing else is checked again: small models have many tensors and few bytes.
        if last is not None and sources and self._host.again(sources):
            return last
        if known is None:  # at the first save, and after a failure: in the training threads
            held, known = agree_on_pieces(pieces, aliases, self.world)
        else:
            held = split_pieces(pieces, aliases)
        offers = make_offers(held)
        changed = offers != known.offers or aliases != known.tied
        wanted = [key for key in known.share if key in held]
        if changed:
            share = set(wanted)
            wanted += [k for k, o in offers.items() if known.offers.get(k) != o and k not in share]
        blocks = dict(
            zip(wanted, self._host.copy_blocks([held[key] for key in wanted]), strict=True)
        )
        self._last = _CopiedBlocks(blocks, shards, offers, aliases, known, changed)
        return self._last

    def _write(self, save: _PendingSave) -> None:
        """Write one save to disk, in the second thread."""
        step = save.target.step

        def remember(event: str, **fields: Any) -> None:
            save.events.append((event, fields))

        try:
            saved = save_collected(save.target, lambda: self._collect(save), self.world, remember)
            save.outcome = SaveOutcome(step, saved, None)
        except CheckpointError as failure:
            save.agreement = None
            save.outcome = SaveOutcome(step, None, failure)
        except Exception as failure:  # not a verdict of all ranks: this one is cut off
            lost = ClusterError(
                f"rank {self.world.rank}: {short_path(save.target.final)} was not saved, and "
                "what the "
                f"other ranks have is not known: {describe_failure(failure)}; start the run again"
            )
            lost.__cause__ = failure
            save.outcome = SaveOutcome(step, None, lost)
        finally:
            save.copied = None

    def _collect(self, save: _PendingSave) -> CheckpointShare:
        if isinstance(save.problem, RankFailed):
            raise save.problem  # raised on every rank already
        exchanged: list[_CopiedBlocks] = []

        def collect_copied() -> bool:
            if save.problem is not None or save.copied is None:
                raise save.problem or CheckpointError("nothing was copied")
            self._host.wait_until_copied()
            exchanged.append(save.copied)
            return save.copied.changed

        changed = gather_results(self.world, collect_copied)
        copied = exchanged[0]
        agreement = copied.agreement
        if any(changed):
            held = make_offers(copied.blocks)
            agreed = agree_on_writers(self.world, lambda: held, copied.aliases)
            agreement = replace(agreed, offers=copied.offers)
        save.agreement = agreement
        return CheckpointShare([copied.blocks[key] for key in agreement.share], agreement)


def _lower_priority() -> None:
    """Lower the calling thread's priority, where threads have their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
