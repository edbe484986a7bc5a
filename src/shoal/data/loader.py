"""Hands out a dataset step by step, the same samples in the same order whatever the layout.

    position p ──order.py──> (epoch, index)        one endless stream; p is the whole state
    p, batch, micro_batch ──base/batches.py──> the step's micro-batches 0, 1, 2 …
    rank, degree ──> those this rank owns (i mod degree) ──fetch.py──> joined samples

Rank, degree and workers decide who fetches, never what. Because the state is one integer, to resume
on another layout, or in the middle of an epoch, is the same as never to have stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from shoal.base.batches import MicroBatch, cut_span, cut_step, owned, steps_per_epoch
from shoal.base.errors import ConfigError
from shoal.data.fetch import Collate, Fetcher, digest_of
from shoal.data.step import LoadedMicroBatch, StepBatch


def check_numbers(batch: int, micro_batch: int, rank: int, degree: int, workers: int) -> None:
    """Errors: ConfigError for the first number that cannot be."""
    for key, got, least in (
        ("train.batch", batch, 1),
        ("train.micro_batch", micro_batch, 1),
        ("data-parallel degree", degree, 1),
        ("data.workers", workers, 0),
    ):
        if got < least:
            raise ConfigError(f"{key} = {got}: must be at least {least}; nearest: {key}={least}")
    if not 0 <= rank < degree:
        raise ConfigError(f"rank = {rank}: must be 0 … {degree - 1}, the data-parallel degree")


class Loader:
    """The steps of a map-style dataset (`dataset[index]`, `len(dataset)`) for one data rank.

    Iterating gives one StepBatch per optimizer step to the end of the current epoch, also where
    this rank owns no micro-batch of the short last step. Iterating again is the next epoch.
    `position` moves when a step is handed out. Setting it ends a running iteration; the next one
    starts there, be it in mid-epoch. `under_way` is true while somebody loops over it. `len()` is
    the steps of an epoch; `restore(loader.state())` goes on there, under any layout.

    Takes   batch, samples per optimizer step over all ranks · micro_batch, samples per forward pass
            seed, of the order and of the samples' own draws · position, samples to begin at
            rank, degree: this rank's place among those that draw different micro-batches
            workers, processes that fetch ahead, at least a step; 0 fetches between steps
            collate, list of samples -> batch; None: torch's default_collate
            shuffle, False: dataset order in every epoch
    Errors  ConfigError for an empty dataset or impossible numbers; while iterating UserError for an
            exception in the dataset or in collate, ClusterError for a failed disk or connection or
            a dead worker process
    Limits  one thread in a worker, several in the main process: a dataset that sums large tensors
            in `__getitem__` may differ between the two in the last bit
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch: int,
        micro_batch: int,
        seed: int,
        rank: int = 0,
        degree: int = 1,
        position: int = 0,
        workers: int = 0,
        collate: Collate | None = None,
        shuffle: bool = True,
    ) -> None:
        check_numbers(batch, micro_batch, rank, degree, workers)
        self.samples = len(dataset)
        if self.samples < 1:
            raise ConfigError(f"data.source: the dataset ({type(dataset).__name__}) has 0 samples")
        self.dataset = dataset
        self.batch = batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.degree = degree
        self.workers = workers
        self._fetcher = Fetcher(dataset, self.samples, seed, shuffle, collate)
        self._moves = 0
        self.position = position
        self.under_way = False
        self._probed = degree == 1

    @property
    def position(self) -> int:
        """Samples handed out so far, over all ranks: where the next step starts in the stream."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise ConfigError(f"loader position = {value}: must be at least 0 samples")
        self._position = value
        self._moves += 1

    def __len__(self) -> int:
        """Steps per epoch, the short last one included."""
        return steps_per_epoch(self.samples, self.batch)

    def state(self) -> dict[str, Any]:
        """The position, and the dataset's length to recognise another dataset; JSON values."""
        return {"position": self.position, "samples": self.samples}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken, under any layout.

        Errors: ConfigError if the dataset's length has changed, because every index would be
        another sample's; a state without `samples` is taken at its word.
        """
        if state.get("samples", self.samples) != self.samples:
            raise ConfigError(
                f"data.source: has {self.samples} samples, the checkpoint was made with "
                f"{state['samples']}: the order would be another; use the same data, or a new run"
            )
        self.position = int(state["position"])

    def __iter__(self) -> Iterator[StepBatch]:
        """The steps from `position` to the end of its epoch."""
        return self._batches(self._steps)

    def over(self, steps: Sequence[tuple[int, int]]) -> Iterator[StepBatch]:
        """Steps that are given: one for each (start, stop) in the stream, none across an epoch."""
        return self._batches(lambda: (cut_span(*span, self.micro_batch) for span in steps))

    def _batches(self, steps: Callable[[], Iterator[list[MicroBatch]]]) -> Iterator[StepBatch]:
        """steps   gives the micro-batches, over all ranks, of one step after another"""
        moves = self._moves
        first = self._position
        looked_at = () if self._probed else ((first, first + 1),) * 2
        fetched = self._fetched(steps(), looked_at)
        self.under_way = True
        try:
            for micro_batches in steps():
                probe = () if self._probed else self._probe(first, next(fetched), next(fetched))
                step = self._step(micro_batches, fetched)
                self._position = step.next_position
                yield replace(step, after=self.state(), stream=id(self), probe=probe)
                if self._moves != moves:
                    return
        finally:
            self.under_way = False

    def _probe(self, position: int, sample: Any, again: Any) -> tuple[Any, ...]:
        """What ranks compare of their datasets: the same sample on each, and whether it stays."""
        self._probed = True
        number = self._fetcher.own_ids(position, position + 1)[0]
        seen = digest_of(sample)
        told = seen if seen == digest_of(again) else "drawn anew at every reading"
        return f"{self.samples} samples", f"sample {number}: {told}"

    def _step(self, micro_batches: list[MicroBatch], fetched: Iterator[Any]) -> StepBatch:
        mine = owned(micro_batches, self.rank, self.degree)
        loaded = [LoadedMicroBatch(m.index, m.start, m.stop, next(fetched)) for m in mine]
        return StepBatch(
            micro_batches=tuple(loaded),
            position=micro_batches[0].start,
            next_position=micro_batches[-1].stop,
            total=len(micro_batches),
            epoch=micro_batches[0].start // self.samples,
            sample_ids=tuple(self._fetcher.own_ids(m.start, m.stop) for m in mine),
        )

    def _steps(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches, over all ranks, of each step to the end of the current epoch."""
        position = self._position
        end = (position // self.samples + 1) * self.samples
        while position < end:
            micro_batches = cut_step(position, self.samples, self.batch, self.micro_batch)
            yield micro_batches
            position = micro_batches[-1].stop

    def _fetched(
        self, steps: Iterator[list[MicroBatch]], before: Sequence[tuple[int, int]]
    ) -> Iterator[Any]:
        """The joined samples of every micro-batch that this rank runs, here or from workers.

        before   spans to fetch first
        """
        own = (
            (m.start, m.stop)
            for micro_batches in steps
            for m in owned(micro_batches, self.rank, self.degree)
        )
        spans = chain(before, own)
        if self.workers == 0:
            return (self._fetcher.value(start, stop) for start, stop in spans)
        from shoal.data.workers import FetcherView, from_workers

        per_step = -(-self.batch // (self.micro_batch * self.degree))
        ahead = max(2, -(-per_step // self.workers))
        return from_workers(FetcherView(self._fetcher), spans, self.workers, ahead)
