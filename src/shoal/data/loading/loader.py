"""Loader: yields a dataset step by step, the same samples in the same order for any layout.

    position p ──sample_order.py──> (epoch, index)        one endless stream; p is the whole state
    p, batch, micro_batch ──base/plans/batches.py──> the step's micro-batches 0, 1, 2 …
    rank, degree ──> those this rank owns (i mod degree) ──fetch.py──> joined samples

Rank, degree and workers decide which process fetches, never the samples. Because the state is one
integer, a resume on another layout, or in the middle of an epoch, equals an uninterrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from shoal.base.errors import ClusterError, ConfigError
from shoal.base.plans.batches import rank_spans, step_end, steps_per_epoch
from shoal.data.loading.dataset_kind import Collate, digest_of
from shoal.data.loading.fetch import FetchedMicroBatches, Fetcher, Span
from shoal.data.loading.step_samples import LoadedMicroBatch, StepBatch

if TYPE_CHECKING:
    from shoal.data.loading.read_retries import UnreadableSample

MESSAGE = 8
"""Most micro-batches fetched and joined at a time; the cost of a message is per tensor."""


def check_numbers(batch: int, micro_batch: int, rank: int, degree: int, workers: int) -> None:
    """Raise ConfigError for the first impossible number."""
    for key, got, least in (
        ("train.batch", batch, 1),
        ("train.micro_batch", micro_batch, 1),
        ("data-parallel degree", degree, 1),
        ("data.workers", workers, 0),
    ):
        if got < least:
            raise ConfigError(f"{key} = {got}: must be at least {least}; try: {key}={least}")
    if not -1 <= rank < degree:
        raise ConfigError(f"rank = {rank}: must be 0 … {degree - 1}, the data-parallel degree")


class Loader:
    """Loader of the steps of a map-style dataset for one data rank.

    Iteration yields one StepBatch per optimizer step to the end of the current epoch, also if this
    rank owns no micro-batch of the short last step. The next iteration is the next epoch.
    `position` moves when a step is yielded. Setting it ends a running iteration; the next one
    starts there, also in mid-epoch. `under_way` is true during a loop. `len()` is the steps of an
    epoch; `restore(loader.state())` continues there, under any layout. `tell` is called with one
    line on restarted worker processes and on samples read in a retry. `leaves_out`: samples that
    fail at all four tries are left out, and the step names them.

    Args:
        batch: samples per optimizer step over all ranks.
        micro_batch: samples per forward pass.
        turn: samples that a stream of sharded data yields at a time (0: a micro-batch), which
            determines their order: a restored state has its own.
        seed: seed of the order and of the samples' own draws.
        position: samples to skip at the start.
        rank, degree: this rank's index among the data ranks, or −1, and their number.
        workers: processes that prefetch, at least a step; 0 fetches between steps.
        collate: list of samples -> batch; None: torch's default_collate.
        shuffle: False: dataset order in every epoch.

    Raises:
        ConfigError: an empty dataset or impossible numbers. While iterating: UserError for an
            exception in the dataset or in collate, ClusterError for a disk or connection that fails
            four times, and for worker processes that die or hang repeatedly.

    Note:
        A worker has one thread, the main process several: a dataset that sums large tensors in
        `__getitem__` may differ between the two in the last bit.
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
        turn: int = 0,
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
        self.turn = turn or micro_batch
        # shards have an order of their own, in which each is read by few ranks
        self._deal = getattr(dataset, "deal", None) if shuffle else None
        order = getattr(dataset, "stream_order", None)
        if self._deal:
            order = self._deal(self.turn, degree)
        self._fetcher = Fetcher(dataset, self.samples, seed, shuffle, collate, order)
        self.tell: Callable[[str], None] | None = None
        self.leaves_out = False
        self._misread: list[UnreadableSample] = []
        self._read_again = 0
        self._moves = 0
        self.left_out: list[Span] = []
        self.position = position
        self.under_way = False
        self._probed = degree == 1

    @property
    def position(self) -> int:
        """Samples yielded so far, over all ranks: the stream position of the next step."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise ConfigError(f"loader position = {value}: must be at least 0 samples")
        self._position = value
        self._moves += 1

    def __len__(self) -> int:
        """Return the steps per epoch, the short last one included."""
        return steps_per_epoch(self.samples, self.batch)

    def state(self) -> dict[str, Any]:
        """Return the position, and the dataset's length to detect another dataset; JSON values."""
        return self._state_at(self._position)

    def _state_at(self, position: int) -> dict[str, Any]:
        left = {"left_out": [list(one) for one in self.left_out]} if self.left_out else {}
        dealt = {"turn": self.turn} if self._deal else {}
        return {"position": position, "samples": self.samples, **dealt, **left}

    def skip_samples(self, start: int, stop: int) -> None:
        """Skip the samples at stream positions start … stop − 1 from now on."""
        self.left_out.append((start, stop))
        self._moves += 1

    def _next_kept_position(self, position: int) -> int:
        """Return the next stream position that is not left out."""
        while beyond := [stop for start, stop in self.left_out if start <= position < stop]:
            position = max(beyond)
        return position

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`, under any layout.

        Raises a ConfigError if the dataset's length has changed, because every index would be
        another sample's; a state without `samples` is not checked.
        """
        if state.get("samples", self.samples) != self.samples:
            raise ConfigError(
                f"data.source: has {self.samples} samples, the checkpoint was made with "
                f"{state['samples']}: the order would be another; use the same data, or a new run"
            )
        if self._deal and state.get("turn", self.turn) != self.turn:
            self.turn = int(state["turn"])
            self._fetcher.reorder(self._deal(self.turn, self.degree))
        self.position = int(state["position"])
        self.left_out = [(int(start), int(stop)) for start, stop in state.get("left_out", ())]

    def __iter__(self) -> Iterator[StepBatch]:
        """Yield the steps from `position` to the end of its epoch."""
        self._position = self._next_kept_position(self._position)
        return self._batches(self._steps)

    def over(self, steps: Sequence[Span]) -> Iterator[StepBatch]:
        """Yield given steps: one for each (start, stop) in the stream, none across an epoch."""
        return self._batches(lambda: iter(steps))

    def _batches(self, steps: Callable[[], Iterator[Span]]) -> Iterator[StepBatch]:
        """Yield step batches; `steps` yields the bounds of each step, over all ranks."""
        moves, first = self._moves, self._position
        self._fetcher.leaves_out = self.leaves_out
        fetched = self._from_workers(steps(), first) if self.workers else iter(())
        self.under_way = True
        try:
            for start, stop in steps():
                since_s = time.perf_counter()
                probe = () if self._probed else self._probe(first, fetched)
                step = self._step(start, stop, fetched, probe)
                self._position = stop
                # It is frozen; `replace` would cost a call for each field in every step.
                object.__setattr__(step, "wait_s", time.perf_counter() - since_s)
                yield step
                if self._moves != moves:
                    return
        finally:
            self.under_way = False

    def _probe(self, position: int, fetched: Iterator[FetchedMicroBatches]) -> tuple[Any, ...]:
        """Return texts on the dataset that ranks compare: a common sample, and if it repeats."""
        self._probed = True
        sample, again = self._values([(position, position + 1)] * 2, fetched)
        if lost := self._take_unreadable():
            raise ClusterError(f"{lost[0].text}; ranks compare their data by it")
        number = self._fetcher.own_ids(position, position + 1)[0]
        seen = digest_of(sample)
        told = seen if seen == digest_of(again) else "drawn anew at every reading"
        return f"{self.samples} samples", f"sample {number}: {told}"

    def _step(
        self, start: int, stop: int, fetched: Iterator[FetchedMicroBatches], probe: tuple[Any, ...]
    ) -> StepBatch:
        spans = self._own_spans(start, stop)
        values = self._values(spans, fetched)
        total = -(-(stop - start) // self.micro_batch)
        numbers = range(self.rank, total, self.degree) if spans else ()
        own = zip(numbers, spans, values, strict=True)
        micro_batches = [LoadedMicroBatch(n, first, end, value) for n, (first, end), value in own]
        ids = self._fetcher.own_ids_of_spans(spans)
        if lost := self._take_unreadable():
            from shoal.data.loading.read_retries import remaining_micro_batches

            places = [one.positions for one in micro_batches]
            micro_batches, ids = remaining_micro_batches(lost, places, micro_batches, ids)
        return StepBatch(
            micro_batches=tuple(micro_batches),
            position=start,
            next_position=stop,
            total=total,
            epoch=start // self.samples,
            sample_ids=ids,
            left_out=lost,
            after=self._state_at(stop),
            stream=id(self),
            probe=probe,
        )

    def _own_spans(self, start: int, stop: int) -> list[Span]:
        """Return this rank's micro-batches of a step."""
        return rank_spans(start, stop, self.micro_batch, self.rank, self.degree)

    def _values(self, spans: list[Span], fetched: Iterator[FetchedMicroBatches]) -> list[Any]:
        """Return the joined samples of some own micro-batches, from workers or loaded here."""
        if not self.workers:
            fetched = iter([self._fetcher.values(spans)] if spans else [])
        values: list[Any] = []
        while len(values) < len(spans):
            joined = next(fetched)
            values += joined.micro_batches()
            self._misread += joined.misread
        return values

    def _take_unreadable(self) -> tuple[UnreadableSample, ...]:
        """Return the samples that no retry could read; report the others that were retried."""
        if not self._misread:
            return ()
        from shoal.data.loading.read_retries import report_retried

        misread, self._misread = self._misread, []
        lost = report_retried(misread, self._read_again, self.tell)
        self._read_again += len(misread) - len(lost)
        return lost

    def _steps(self) -> Iterator[Span]:
        """Yield the bounds of each step, to the end of the current epoch."""
        position = self._position
        end = (position // self.samples + 1) * self.samples
        while position < end:
            stop = step_end(position, self.samples, self.batch)
            yield position, stop
            position = self._next_kept_position(stop)

    def _from_workers(self, steps: Iterator[Span], first: int) -> Iterator[FetchedMicroBatches]:
        """Yield the workers' messages: first that for `_probe`, then own micro-batches."""
        from shoal.data.loading.worker_pool import (  # torch's, which one may do without
            FetcherView,
            fetch_in_workers,
            warn,
        )

        spans = chain([] if self._probed else [[(first, first + 1)] * 2], self._messages(steps))
        per_step = -(-self.batch // (self.micro_batch * self.degree * MESSAGE))
        ahead = max(2, -(-per_step // self.workers))
        view = FetcherView(self._fetcher, self.workers)
        return fetch_in_workers(view, spans, self.workers, ahead, self.tell or warn)

    def _messages(self, steps: Iterator[Span]) -> Iterator[list[Span]]:
        """Yield spans of this rank's micro-batches; those of one message are of one step."""
        for step in steps:
            own = self._own_spans(*step)
            yield from (own[at : at + MESSAGE] for at in range(0, len(own), MESSAGE))
