"""Reads one rank's streams of shards, in the main process or in one worker process.

    held, taken (of a Deal), turns ──ShardReader.read──> Answer: micro-batches, and what ended

One sample of each stream is read ahead, so that a shard is known to have ended in the step that
takes its last sample. A stream that is opened in the midst of a shard, after a resume, goes there
by the shard's own state, or by reading it from its front.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.utils.data
from torch.utils.data import IterableDataset

from shoal.base.errors import ClusterError, ConfigError, UserError
from shoal.data.dataset import Collate, join, load_error
from shoal.data.deal import Deal, Ended, Turn
from shoal.data.reader import END
from shoal.data.seeding import draws_nothing, kept_draws, seed_draws
from shoal.data.workers import Failure, from_workers

NOTHING = object()


@dataclass
class Answer:
    """What one rank read of a step.

    sizes     samples that each of its turns gave, by the turn's number
    values    its micro-batches, joined, by the turn's number
    ended     streams in which a shard ended · places  the state of each stream's shard, or None
    """

    sizes: dict[int, int] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Opened:
    """A shard that is being read: its samples so far, and the one read ahead."""

    number: int
    shard: Any
    source: Iterator[Any]
    taken: int = 0
    ahead: Any = NOTHING


class ShardReader:
    """Reads the streams of one epoch that a rank owns.

    shards   has `open(number, seed, epoch, streams)` and `has_places`
    rank, degree   this rank's place among those with other micro-batches
    whole    every rank reads all streams, and keeps micro-batches rank, rank + degree, …
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
    ) -> None:
        self.shards = shards
        self.seed, self.epoch = seed, epoch
        self.rank, self.degree, self.whole = rank, degree, whole
        self.collate = collate
        self.places = dict(places)
        self._is_quiet = draws_nothing(shards) and collate is None
        self._opened: dict[int, _Opened] = {}
        self._held: Sequence[Sequence[int]] = ()
        self._taken: Sequence[int] = ()
        self._finished: dict[int, int] = {}

    def owns(self, stream: int) -> bool:
        """Whether this rank reads a stream."""
        return self.whole or stream % self.degree == self.rank

    def read(
        self, held: Sequence[Sequence[int]], taken: Sequence[int], turns: Sequence[Turn]
    ) -> Answer:
        """This rank's part of a step; without turns: whether its streams have a sample.

        held, taken   as in `Deal`, before the step

        Errors   UserError or ClusterError for what the dataset or collate raises, ConfigError for
                 a shard that is shorter than it was
        """
        self._held, self._taken, self._finished = held, taken, {}
        with nullcontext() if self._is_quiet else kept_draws():
            return self._read(turns)

    def _read(self, turns: Sequence[Turn]) -> Answer:
        answer = Answer()
        index = 0
        for turn, (stream, size) in enumerate(turns):
            if not self.owns(stream):
                continue
            samples = self._take(stream, size)
            answer.sizes[turn] = len(samples)
            if samples and (not self.whole or index % self.degree == self.rank):
                answer.values[turn] = self._join(samples, stream)
            index += bool(samples)
        asked = {stream for stream, _ in turns} if turns else range(len(self._held))
        for stream in filter(self.owns, asked):
            self._look_ahead(stream, answer)
        return answer

    def _look_ahead(self, stream: int, answer: Answer) -> None:
        opened = self._opened.get(stream)
        if opened is not None and opened.ahead is not NOTHING:
            return
        place = None
        if self.shards.has_places and opened is not None and opened.taken:
            place = opened.shard.state_dict()  # before the sample that is read ahead
        sample = self._next(stream)
        opened = self._opened.get(stream)
        if opened is not None and sample is not END:
            opened.ahead, opened.taken = sample, opened.taken - 1
        finished = self._finished.get(stream, 0)
        taken = 0 if opened is None else opened.taken
        if finished:
            answer.ended[stream] = (finished, taken)
        answer.places[str(stream)] = place if taken else None

    def _take(self, stream: int, size: int) -> list[Any]:
        samples: list[Any] = []
        while len(samples) < size and (sample := self._next(stream)) is not END:
            samples.append(sample)
        return samples

    def _next(self, stream: int) -> Any:
        """The stream's next sample, of the next shard where one ends; END where it holds none."""
        held = self._held[stream]
        while self._finished.get(stream, 0) < len(held):
            opened = self._opened.get(stream)
            if opened is None:
                number = held[self._finished.get(stream, 0)]
                opened = self._opened[stream] = self._open(stream, number)
            sample, opened.ahead = opened.ahead, NOTHING
            if sample is NOTHING:
                sample = self._pull(opened)
            if sample is not END:
                opened.taken += 1
                return sample
            del self._opened[stream]
            self._finished[stream] = self._finished.get(stream, 0) + 1
        return END

    def _open(self, stream: int, number: int) -> _Opened:
        shard = self.shards.open(number, self.seed, self.epoch, len(self._held))
        taken = 0 if self._finished.get(stream) else self._taken[stream]
        place = self.places.pop(str(stream), None)
        if taken and place is not None:
            shard.load_state_dict(place)
        opened = _Opened(number, shard, iter(shard))
        if place is not None:
            opened.taken = taken
        while opened.taken < taken:
            if self._pull(opened) is END:
                raise ConfigError(
                    f"data.source: shard {number} ends after {opened.taken} samples, the "
                    f"checkpoint was made after {taken} of it; use the same data, or a new run"
                )
            opened.taken += 1
        return opened

    def _pull(self, opened: _Opened) -> Any:
        self._seed((opened.number, opened.taken))
        try:
            with _no_worker():
                return next(opened.source, END)
        except Exception as error:
            where = f"shard {opened.number}, sample {opened.taken} (epoch {self.epoch})"
            raise load_error(f"data.source: {where}", error) from error

    def _seed(self, what: object) -> None:
        """Let draws follow from (seed, epoch, what) alone; `read` puts the generators back."""
        if not self._is_quiet:
            seed_draws(self.seed, self.epoch, what)

    def _join(self, samples: list[Any], stream: int) -> Any:
        opened = self._opened.get(stream)
        at = (opened.number, opened.taken) if opened else self._held[stream][-1:]
        where = f"samples of stream {stream} (epoch {self.epoch})"
        self._seed(("collate", stream, at))
        return join(samples, self.collate, where)


@contextmanager
def _no_worker() -> Iterator[None]:
    """Inside, torch tells of no worker process: `datasets` would deal a shard among them itself."""
    kept = torch.utils.data.get_worker_info
    torch.utils.data.get_worker_info = lambda: None
    try:
        yield
    finally:
        torch.utils.data.get_worker_info = kept


class _Served(IterableDataset[Any]):
    """A reader in a worker process: one answer for each question that comes through a pipe."""

    def __init__(self, reader: ShardReader, requests: Any) -> None:
        self.reader, self.requests = reader, requests

    def __iter__(self) -> Iterator[Answer | Failure]:
        while (request := self.requests.recv()) is not None:
            try:
                yield self.reader.read(*request)
            except (UserError, ClusterError) as error:
                yield Failure.of(error)
                return


class Asked:
    """A reader that is asked for a step and answers later; where there are workers, from one.

    Errors of `answer()`: those of ShardReader.read; ClusterError if the worker process dies
    """

    def __init__(self, reader: ShardReader, workers: int) -> None:
        self.reader = reader
        self._request: Any = None
        self._requests: Any = None
        if workers:
            receive, self._requests = multiprocessing.Pipe(duplex=False)
            self._answers = from_workers(_Served(reader, receive), None, 1, 2)

    def ask(self, deal: Deal, turns: Sequence[Turn]) -> None:
        """Have a step read; a worker begins at once."""
        self._request = (deal.held, deal.taken, turns)
        if self._requests is not None:
            self._requests.send(self._request)

    def answer(self) -> Answer:
        """The step that was asked for."""
        if self._requests is None:
            return self.reader.read(*self._request)
        answer: Answer = next(self._answers)
        return answer

    def close(self) -> None:
        """End the worker process."""
        if self._requests is not None:
            with suppress(OSError):  # it died
                self._requests.send(None)  # it waits for a question, and torch would wait for it
            self._answers.close()
