"""Loader of iterables, which can only be read front to back: generators, streams, torch's own.

An iterable has no index, so it determines its order. Every rank reads the whole stream and keeps
only its own micro-batches. So the order does not depend on the layout, but every rank reads all
samples. One sample is prefetched to know whether a step is the epoch's last, so that no step
straddles the end.

State: the position, and the iterable's own `state_dict()`, taken after the step's last sample and
before the prefetched one. An iterable without it trains, but cannot be resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from shoal.base.errors import ConfigError
from shoal.base.plans.batches import steps_per_epoch
from shoal.data.loading.dataset_kind import Collate
from shoal.data.loading.epoch_reader import ReadStep, StepReader, is_resumable
from shoal.data.loading.loader import check_numbers
from shoal.data.loading.step_samples import StepBatch
from shoal.data.loading.worker_pool import WorkerFailure, fetch_in_workers


class IterableLoader:
    """Loader of the steps of an iterable for one data rank, read front to back, like `Loader`.

    Iteration yields one StepBatch per optimizer step to the end of the epoch, in the iterable's own
    order. Every rank reads all samples and keeps its own micro-batches, so the iterable must yield
    the same samples on each rank. A new loop after an early exit continues in the stream.

    Args:
        iterable, batch, micro_batch, seed, rank, degree, collate: as for Loader.
        workers: above 0: one process prefetches, whatever the number.
        position: only 0.

    Attributes:
        leaves_out: skip samples that a disk or a connection fails to deliver at every try, if the
            iterable's state has the next position; on one rank only.

    Returns:
        `position`, samples yielded so far over all ranks, can only be set by `restore(state)`,
        together with the iterable's state; `len()` needs an iterable with a length (TypeError).

    Raises:
        ConfigError: impossible numbers, an iterable without samples in an epoch (a generator can be
            read once), or a state that is not JSON or cannot be loaded. While iterating: UserError
            for an exception in the iterable or in collate, ClusterError for a failed disk or
            connection or a dead worker process.
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
        """Samples yielded so far, over all ranks and epochs."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value != self._position:
            raise ConfigError(
                f"loader position = {value}: an iterable cannot be moved to a sample; restore() a "
                f"state() of the loader, or use a dataset with __getitem__ and __len__"
            )

    def __len__(self) -> int:
        """Return the steps per epoch; TypeError if the iterable has no length."""
        return steps_per_epoch(len(self.iterable), self.batch)

    def state(self) -> dict[str, Any]:
        """Return position, epoch, and the iterable's own state (None without one); JSON values."""
        return {
            "position": self._position,
            "epoch": self.epoch,
            "epoch_start": self.epoch_start,
            "iterable": json.loads(self._state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`, under any layout.

        Raises a ConfigError if that is not the start and the iterable cannot load its state.
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
        """Yield the steps from `position` to the end of the epoch."""
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
        since_s = time.perf_counter()
        for read in running:
            empty = False
            self._position, self._state = read.batch.next_position, read.state
            if read.ended:
                self._end_epoch()
            batch = read.batch
            if read.misread:
                batch = self._drop_unreadable(read)
            wait_s = time.perf_counter() - since_s
            yield replace(batch, after=self.state(), stream=id(self), wait_s=wait_s)
            if self._moves != moves or read.ended:
                return
            since_s = time.perf_counter()
        self._running = None
        if empty:
            why = ": it can be read once; give an object whose __iter__ starts anew"
            raise ConfigError(
                f"data.source: {type(self.iterable).__name__} gives no samples in epoch "
                f"{self.epoch}{why if self.epoch else ''}"
            )

    def _drop_unreadable(self, read: ReadStep) -> StepBatch:
        """Return a step without unreadable samples; micro-batches that lost all are dropped."""
        from shoal.data.loading.read_retries import remaining_micro_batches, report_retried

        batch = read.batch
        lost = report_retried(read.misread, self._read_again, self.tell)
        self._read_again += len(read.misread) - len(lost)
        places = [one.positions for one in batch.micro_batches]
        kept, ids = remaining_micro_batches(lost, places, batch.micro_batches, batch.sample_ids)
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
    """Yield read steps without a reference to the loader: a cycle would delay the worker's end."""
    if workers:
        yield from fetch_in_workers(reader, None, 1, 2)
        return
    for read in reader:
        if isinstance(read, WorkerFailure):
            read.raise_again()
        else:
            yield read


def full_read_warning(iterable: Any, degree: int) -> str:
    """Return the warning that every rank reads the whole iterable; "" on one rank."""
    if degree < 2:
        return ""
    return (
        f"data.source: {type(iterable).__name__} can only be iterated, so each of {degree} ranks "
        f"reads all of it and keeps its own micro-batches; try: a dataset with __getitem__ and "
        f"__len__, or a streaming dataset of the library datasets, whose files are dealt"
    )
