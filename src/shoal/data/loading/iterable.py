"""The same for data that can only be read from front to back: generators, streams, torch's own.

An iterable has no index, so its order is its own, and every rank reads the whole stream and keeps
only its own micro-batches: the order does not depend on the layout, at the price of reading (not
keeping) all samples on every rank. One sample is read ahead to know whether a step is the epoch's
last, so that no step straddles the end.

State: the position, and the iterable's own `state_dict()`, taken after the step's last sample and
before the one read ahead. An iterable without it trains, but cannot be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.plans.batches import steps_per_epoch
from shoal.data.loading.dataset_kind import Collate
from shoal.data.loading.epoch_reader import ReadStep, StepReader, is_resumable
from shoal.data.loading.loader import check_numbers
from shoal.data.loading.step_samples import StepBatch
from shoal.data.loading.worker_pool import Failure, from_workers


class IterableLoader:
    """The steps of an iterable for one data rank, read front to back; used as a `Loader` is.

    Iterating gives one StepBatch per optimizer step to the end of the epoch, in the iterable's own
    order. Every rank reads all of it and keeps its own micro-batches, so the iterable must give the
    same samples on each. Leaving a loop early and coming back goes on in the stream.

    Takes   iterable, batch, micro_batch, seed, rank, degree, collate: as Loader
            workers, above 0: one process that reads ahead, whatever the number · position, only 0
            leaves_out, an attribute: of a sample that a disk or a connection refused at every try
            nothing comes, where the iterable's state says where it goes on; on one rank

    Returns:
        `position`, samples handed out so far over all ranks, can only be set by `restore(state)` of
        a `state()`, together with the iterable's state; `len()` needs an iterable with a length
        (TypeError).

    Raises:
        ConfigError: for impossible numbers, for an iterable that gives nothing in an epoch (a
            generator can be read once), for a state that is not JSON or cannot be taken back; while
            iterating UserError for an exception in the iterable or in collate, ClusterError for a
            failed disk or connection or a dead worker process.
    """

    def __init__(
        self,
        iterable: Any,
        *,
        batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        degree: int = 1,
        position: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
    ) -> None:
        check_numbers(batch, micro_batch, rank, degree, workers)
        self.iterable = iterable
        self.batch = batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.degree = degree
        self.workers = workers
        self.epoch = 0
        self.epoch_start = 0
        self._seed = seed
        self._collate = collate
        self._state = "null"
        self._position = 0
        self._moves = 0
        self._running: Iterator[ReadStep] | None = None
        self._read_again = 0
        self.tell: Callable[[str], None] | None = None
        self.leaves_out = False
        self.position = position
        self.under_way = False

    @property
    def position(self) -> int:
        """Samples handed out so far, over all ranks and epochs."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value != self._position:
            raise ConfigError(
                f"loader position = {value}: an iterable cannot be moved to a sample; restore() a "
                f"state() of the loader, or use a dataset with __getitem__ and __len__"
            )

    def __len__(self) -> int:
        """Steps per epoch. Errors: TypeError if the iterable has no length."""
        return steps_per_epoch(len(self.iterable), self.batch)

    def state(self) -> dict[str, Any]:
        """Position, epoch, and the iterable's own state (None if it has none); JSON values."""
        return {
            "position": self._position,
            "epoch": self.epoch,
            "epoch_start": self.epoch_start,
            "iterable": json.loads(self._state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken, under any layout.

        Errors: ConfigError if that is not the start and the iterable cannot take its state back.
        """
        position, kept = int(state["position"]), state.get("iterable")
        if position and not is_resumable(self.iterable):
            raise ConfigError(
                f"data.source: cannot resume at sample {position}: {type(self.iterable).__name__} "
                f"has no state_dict() and load_state_dict(); add both, or start a new run"
            )
        if position:
            self.iterable.load_state_dict(kept)
        self._position = position
        self._state = json.dumps(kept)
        self.epoch = int(state.get("epoch", 0))
        self.epoch_start = int(state.get("epoch_start", 0))
        self._moves += 1
        self._running = None

    def __iter__(self) -> Iterator[StepBatch]:
        """The steps from `position` to the end of the epoch."""
        self.under_way = True
        try:
            yield from self._steps()
        finally:
            self.under_way = False

    def _steps(self) -> Iterator[StepBatch]:
        moves = self._moves
        empty = self._position == self.epoch_start
        if self._running is None:
            self._running = self._read()
        running = self._running  # kept: leaving a loop early and coming back goes on in the stream
        for read in running:
            empty = False
            self._position, self._state = read.batch.next_position, read.state
            if read.ended:
                self._end_epoch()
            batch = read.batch
            if read.misread:
                batch = self._without_lost(read)
            yield replace(batch, after=self.state(), stream=id(self))
            if self._moves != moves or read.ended:
                return
        self._running = None
        if empty:
            why = ": it can be read once; give an object whose __iter__ starts anew"
            raise ConfigError(
                f"data.source: {type(self.iterable).__name__} gives no samples in epoch "
                f"{self.epoch}{why if self.epoch else ''}"
            )

    def _without_lost(self, read: ReadStep) -> StepBatch:
        """A step without what could not be read; micro-batches that lost all are none."""
        from shoal.data.loading.read_retries import told_and_lost, what_is_left

        batch = read.batch
        lost = told_and_lost(read.misread, self._read_again, self.tell)
        self._read_again += len(read.misread) - len(lost)
        places = [one.positions for one in batch.micro_batches]
        kept, ids = what_is_left(lost, places, batch.micro_batches, batch.sample_ids)
        return replace(batch, micro_batches=tuple(kept), sample_ids=ids, left_out=lost)

    def _end_epoch(self) -> None:
        self.epoch += 1
        self.epoch_start = self._position
        self._running = None
        if self.workers and is_resumable(self.iterable):
            self.iterable.load_state_dict(json.loads(self._state))  # only the worker's copy moved

    def _read(self) -> Iterator[ReadStep]:
        reader = StepReader(
            self.iterable,
            batch=self.batch,
            micro_batch=self.micro_batch,
            rank=self.rank,
            degree=self.degree,
            seed=self._seed,
            collate=self._collate,
            epoch=self.epoch,
            epoch_start=self.epoch_start,
            position=self._position,
            leaves_out=self.leaves_out,
        )
        return _read_steps(reader, self.workers)


def _read_steps(reader: StepReader, workers: int) -> Iterator[ReadStep]:
    """Holds no loader: a cycle would leave the worker process to the garbage collector."""
    if workers:
        yield from from_workers(reader, None, 1, 2)
        return
    for read in reader:
        if isinstance(read, Failure):
            read.raise_again()
        else:
            yield read


def whole_line(iterable: Any, degree: int) -> str:
    """Say what it costs on several ranks that an iterable cannot be dealt to them; "" on one."""
    if degree < 2:
        return ""
    return (
        f"data.source: {type(iterable).__name__} can only be iterated, so each of {degree} ranks "
        f"reads all of it and keeps its own micro-batches; try: a dataset with __getitem__ and "
        f"__len__, or a streaming dataset of the library datasets, whose files are dealt"
    )
