"""Reader of one rank's streams of shards, in the main process or in one worker process.

    held, taken (of a Deal), turns ──ShardReader.read──> Answer: micro-batches, and what ended

One sample of each stream is prefetched, so that the end of a shard is known in the step that takes
its last sample. After a resume, a stream reaches its position by the shard's own state, or by
reading the shard from its front.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset

from shoal.base.attribute_patch import patch_attribute
from shoal.base.errors import ClusterError, ConfigError, ShoalError, UserError
from shoal.data.loading.dataset_kind import Collate, is_transient, join_samples, load_error
from shoal.data.loading.epoch_reader import END
from shoal.data.loading.sample_seeds import draws_nothing, preserved_rng, seed_draws
from shoal.data.loading.worker_pool import WorkerFailure, fetch_in_workers
from shoal.data.streams.shard_order import Ended, ShardAssignment, Turn

NOTHING = object()


@dataclass
class StepAnswer:
    """Samples of a step that one rank read.

    Attributes:
        sizes: samples of each of its turns, by the turn's number.
        values: its micro-batches, joined, in their order.
        late: samples whose first read failed: turn, place in it, and the fields of `LateSample`.
        ended: streams in which a shard ended.
        places: the state of each stream's shard, or None.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    ended: dict[int, Ended] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    late: list[tuple[int, int, int, str, bool]] = field(default_factory=list)


class _OpenShard:
    """An open shard, with a known position and the number of consumed samples `taken`.

    Attributes:
        known: a position from its own state, and the samples before it; (0, None): its front.
        ahead: the prefetched sample.
    """

    end = END

    def __init__(self, reader: ShardReader, number: int, known: tuple[int, Any]) -> None:
        self.reader, self.number, self.known = reader, number, known
        self.ahead: Any = NOTHING
        self.leaves_out = reader.leaves_out
        self.open()

    def open(self) -> None:
        """Open the shard at the known position."""
        reader = self.reader
        self.shard = reader.shards.open(self.number, reader.seed, reader.epoch, reader.streams)
        self.taken, place = self.known
        if place is not None:
            self.shard.load_state_dict(place)
        self._source = iter(self.shard)

    def go_to(self, taken: int, pull: Callable[[], Any]) -> None:
        """Read until `taken` samples are consumed; ConfigError if the shard is shorter."""
        while self.taken < taken:
            if pull() is END:
                raise ConfigError(
                    f"data.source: shard {self.number} ends after {self.taken} samples, the "
                    f"checkpoint was made after {taken} of it; use the same data, or a new run"
                )
            self.taken += 1

    def next(self) -> Any:
        """Return the next sample, or END; `LateSample` if it took more than one try."""
        try:
            return self.once()
        except Exception as error:
            if not is_transient(error):
                raise self.read_error(error) from error
            from shoal.data.loading.read_retries import retry_next_sample

            self.reader.were_late = True
            return retry_next_sample(self, f"shard {self.number}, sample {self.taken}", error)

    def once(self) -> Any:
        """Read the next sample, or END, in one try."""
        self.reader.seed_draws((self.number, self.taken))
        with _no_worker():
            return next(self._source, END)

    def stands(self) -> int:
        """Return the number of consumed samples."""
        return self.taken

    def seek(self, at: int) -> None:
        """Restart the shard, and go to the position after `at` samples."""
        self.open()
        self.go_to(at, self.once)

    def state_text(self) -> Any:
        """Return the position in its state; None if that is not exact."""
        return self.shard.state_dict() if self.reader.shards.has_places else None

    def skip_to(self, place: Any) -> None:
        """Continue from a position one sample further, which counts when it is returned."""
        self.known = self.taken + 1, place
        self.open()
        self.taken -= 1

    def read_error(self, error: Exception, why: str = "") -> ShoalError:
        """Return the one-line error for its next sample, which is unreadable."""
        where = f"shard {self.number}, sample {self.taken} (epoch {self.reader.epoch})"
        return load_error(f"data.source: {where}{why}", error)


class ShardReader:
    """Reader of the streams of one epoch that a rank owns.

    Args:
        shards: object with `open(number, seed, epoch, streams)` and `has_places`.
        rank, degree: this rank's index among the data ranks, and their number.
        whole: every rank reads all streams, and keeps micro-batches rank, rank + degree, …
        micro_batch: samples to join, over as many turns as needed; 0: those of each turn.
        leaves_out: samples that a disk or a connection fails to deliver at every try are left out.
    """

    def __init__(
        self,
        shards: Any,
        *,
        seed: int,
        epoch: int,
        rank: int,
        degree: int,
        whole: bool,
        collate: Collate | None,
        places: dict[str, Any],
        leaves_out: bool = False,
        micro_batch: int = 0,
    ) -> None:
        self.shards, self.micro_batch = shards, micro_batch
        self.leaves_out = leaves_out and not (whole and degree > 1)
        self.seed, self.epoch = seed, epoch
        self.rank, self.degree, self.whole = rank, degree, whole
        self.collate = collate
        self.places = dict(places)
        self._is_quiet = draws_nothing(shards) and collate is None
        self._opened: dict[int, _OpenShard] = {}
        self._held: Sequence[Sequence[int]] = ()
        self.streams = 0
        self._taken: Sequence[int] = ()
        self._finished: dict[int, int] = {}
        self.were_late = False

    def owns(self, stream: int) -> bool:
        """Return whether this rank reads a stream."""
        return self.whole or stream % self.degree == self.rank

    def read(
        self, held: Sequence[Sequence[int]], taken: Sequence[int], turns: Sequence[Turn]
    ) -> StepAnswer:
        """Read this rank's part of a step; without turns only check its streams for a sample.

        Args:
            held, taken: as in `ShardAssignment`, before the step.

        Raises:
            UserError or ClusterError: the dataset or collate raises; ConfigError if a shard is
                shorter than before.
        """
        self._held, self._taken, self._finished = held, taken, {}
        self.streams = len(held)
        with nullcontext() if self._is_quiet else preserved_rng():
            return self._read(turns)

    def _read(self, turns: Sequence[Turn]) -> StepAnswer:
        answer = StepAnswer()
        taken: list[tuple[int, list[Any]]] = []
        for turn, (stream, size) in enumerate(turns):
            if not self.owns(stream):
                continue
            samples = self._consume(stream, size)
            answer.sizes[turn] = len(samples)
            if samples:
                taken.append((stream, samples))
            if self.were_late:
                from shoal.data.loading.read_retries import split_late_samples

                answer.late += [(turn, *one) for one in split_late_samples(samples)[1]]
        for index, (stream, samples) in enumerate(self._cut(taken)):
            if not self.whole or index % self.degree == self.rank:
                answer.values.append(self._join(samples, stream))
        asked = {stream for stream, _ in turns} if turns else range(len(self._held))
        for stream in filter(self.owns, asked):
            self._prefetch(stream, answer)
        return answer

    def _cut(self, taken: list[tuple[int, list[Any]]]) -> list[tuple[int, list[Any]]]:
        """Return the samples of each micro-batch, with the stream of the last one."""
        if not self.micro_batch:
            return taken
        flat = [(stream, sample) for stream, samples in taken for sample in samples]
        firsts = range(0, len(flat), self.micro_batch)
        cuts = [flat[first : first + self.micro_batch] for first in firsts]
        return [(cut[-1][0], [sample for _, sample in cut]) for cut in cuts]

    def _prefetch(self, stream: int, answer: StepAnswer) -> None:
        opened = self._opened.get(stream)
        if opened is not None and opened.ahead is not NOTHING:
            return
        place = None
        if opened is not None and opened.taken:
            place = opened.state_text()  # before the sample that is read ahead
            opened.known = opened.known if place is None else (opened.taken, place)
        sample = self._next(stream)
        opened = self._opened.get(stream)
        if opened is not None and sample is not END:
            opened.ahead, opened.taken = sample, opened.taken - 1
        finished = self._finished.get(stream, 0)
        taken = 0 if opened is None else opened.taken
        if finished:
            answer.ended[stream] = (finished, taken)
        answer.places[str(stream)] = place if taken else None

    def _consume(self, stream: int, size: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < size and (sample := self._next(stream)) is not END:
            samples.append(sample)
        return samples

    def _next(self, stream: int) -> Any:
        """Return the stream's next sample, from the next shard if one ends; END without a shard."""
        held = self._held[stream]
        while self._finished.get(stream, 0) < len(held):
            opened = self._opened.get(stream)
            if opened is None:
                number = held[self._finished.get(stream, 0)]
                opened = self._opened[stream] = self._open(stream, number)
            sample, opened.ahead = opened.ahead, NOTHING
            if sample is NOTHING:
                sample = opened.next()
            if sample is not END:
                opened.taken += 1
                return sample
            del self._opened[stream]
            self._finished[stream] = self._finished.get(stream, 0) + 1
        return END

    def _open(self, stream: int, number: int) -> _OpenShard:
        taken = 0 if self._finished.get(stream) else self._taken[stream]
        place = self.places.pop(str(stream), None)
        opened = _OpenShard(
            self, number, (taken, place) if taken and place is not None else (0, None)
        )
        opened.go_to(taken, opened.next)
        return opened

    def seed_draws(self, what: object) -> None:
        """Seed draws by (seed, epoch, what) alone; `read` restores the generators."""
        if not self._is_quiet:
            seed_draws(self.seed, self.epoch, what)

    def _join(self, samples: list[Any], stream: int) -> Any:
        """Join the readable samples by collate; None if there are none."""
        if self.were_late:
            from shoal.data.loading.read_retries import split_late_samples

            samples = split_late_samples(samples)[0]
        if not samples:
            return None
        opened = self._opened.get(stream)
        at = (opened.number, opened.taken) if opened else self._held[stream][-1:]
        where = f"samples of stream {stream} (epoch {self.epoch})"
        self.seed_draws(("collate", stream, at))
        return join_samples(samples, self.collate, where)


def _no_worker() -> AbstractContextManager[None]:
    """Hide the torch worker process: `datasets` would split a shard among workers itself."""
    return patch_attribute(torch.utils.data, "get_worker_info", lambda: None)


class _WorkerReader(IterableDataset[Any]):
    """A reader in a worker process: one answer for each request from a pipe."""

    def __init__(self, reader: ShardReader, requests: Any) -> None:
        self.reader, self.requests = reader, requests

    def __iter__(self) -> Iterator[StepAnswer | WorkerFailure]:
        while (request := self.requests.recv()) is not None:
            try:
                yield self.reader.read(*request)
            except (UserError, ClusterError) as error:
                yield WorkerFailure.of(error)
                return


class ReaderClient:
    """A reader with separate request and answer; with workers, in a worker process.

    Raises:
        ClusterError: the worker process died; `answer()` raises the errors of ShardReader.read too.
    """

    def __init__(self, reader: ShardReader, workers: int) -> None:
        self.reader = reader
        self._request: Any = None
        self._requests: Any = None
        if workers:
            receive, self._requests = multiprocessing.Pipe(duplex=False)
            self._answers = fetch_in_workers(_WorkerReader(reader, receive), None, 1, 2)

    def ask(self, deal: ShardAssignment, turns: Sequence[Turn]) -> None:
        """Request a step; a worker starts to read at once."""
        self._request = (deal.held, deal.taken, turns)
        if self._requests is not None:
            self._requests.send(self._request)

    def answer(self) -> StepAnswer:
        """Return the requested step."""
        if self._requests is None:
            return self.reader.read(*self._request)
        return next(self._answers)

    def close(self) -> None:
        """End the worker process."""
        if self._requests is not None:
            with suppress(OSError):  # it died
                self._requests.send(None)  # it waits for a request, and torch would wait for it
            self._answers.close()
