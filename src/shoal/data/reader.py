"""Reads one epoch of an iterable step by step, in the main process or in one worker process.

    sample, sample, … ──cut into batches──> ReadStep(this rank's micro-batches, state, ended)

The state is the iterable's own, as JSON text, after the step's last sample and before the one read
ahead; it travels with the step, so that reading ahead in a worker does not run away with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from shoal.base.batches import cut_step
from shoal.base.errors import ClusterError, ConfigError, UserError
from shoal.data.fetch import (
    Collate,
    digest_of,
    draws_nothing,
    join,
    load_error,
    seeded_draws,
)
from shoal.data.step import LoadedMicroBatch, StepBatch
from shoal.data.workers import Failure

END = object()


@dataclass(frozen=True)
class ReadStep:
    """One step as read, with the iterable's state after it and whether the epoch ended there."""

    batch: StepBatch
    state: str
    ended: bool


def is_resumable(iterable: object) -> bool:
    """True if the iterable can tell and take back where it stands."""
    return all(callable(getattr(iterable, n, None)) for n in ("state_dict", "load_state_dict"))


def _state_text(iterable: Any) -> str:
    """The iterable's state as JSON text, a copy that later reading cannot change."""
    if not is_resumable(iterable):
        return "null"
    state = iterable.state_dict()
    try:
        return json.dumps(state)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"data.source: {type(iterable).__name__}.state_dict() is not JSON ({error}); use "
            f"numbers, strings, lists and dicts with string keys"
        ) from error


class StepReader(IterableDataset[Any]):
    """The steps of one epoch of an iterable, from stream position `position` to its end.

    Takes   epoch, and epoch_start, the position at which it began: samples are numbered from there
            batch, micro_batch, rank, degree, collate, seed: as for Loader
    Gives   ReadStep after ReadStep; or a Failure, the user's own error, as the last
    """

    def __init__(
        self,
        iterable: Any,
        *,
        batch: int,
        micro_batch: int,
        rank: int,
        degree: int,
        seed: int,
        collate: Collate | None,
        epoch: int,
        epoch_start: int,
        position: int,
    ) -> None:
        self.iterable = iterable
        self.batch = batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.degree = degree
        self.seed = seed
        self.collate = collate
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.position = position
        self.quiet = draws_nothing(iterable)
        self.probed: list[str] = []
        self._probing = degree > 1

    def __iter__(self) -> Iterator[ReadStep | Failure]:
        """The steps from `position` to the end of the epoch."""
        try:
            yield from self._steps()
        except (UserError, ClusterError) as error:
            yield Failure.of(error)

    def _steps(self) -> Iterator[ReadStep]:
        source = self._open()
        first = self._next(source)
        if first is END and self.position == self.epoch_start and is_resumable(self.iterable):
            # its state was taken at the end of an epoch, and what is left of that one is nothing
            source = self._open()
            first = self._next(source)
        while first is not END:
            start = self.position
            count, kept, sample = self._read(source, first)
            state = _state_text(self.iterable)
            first = END if sample is END else self._next(source)
            batch = self._join(start, count, kept)
            if self.probed:
                probe = (f"the first {count} samples", digest_of(self.probed))
                batch, self.probed = replace(batch, probe=probe), []
            yield ReadStep(batch, state, first is END)

    def _read(self, source: Iterator[Any], sample: Any) -> tuple[int, dict[int, list[Any]], Any]:
        """One step from `sample` on: samples read, this rank's by micro-batch, END or the last."""
        kept: dict[int, list[Any]] = {}
        count = 0
        probing, self._probing = self._probing, False
        while True:
            if probing:  # every rank reads all, and must read the same
                self.probed.append(digest_of(sample))
            index = count // self.micro_batch
            if index % self.degree == self.rank:
                kept.setdefault(index, []).append(sample)
            count += 1
            self.position += 1
            if count == self.batch:
                return count, kept, sample
            sample = self._next(source)
            if sample is END:
                return count, kept, END

    def _drawing(self, what: object, quiet: bool) -> AbstractContextManager[None]:
        """Random draws inside follow from (seed, epoch, what) alone, and leave none behind."""
        return nullcontext() if quiet else seeded_draws(self.seed, self.epoch, what)

    def _open(self) -> Iterator[Any]:
        with self._drawing("start", self.quiet):
            return iter(self.iterable)

    def _next(self, source: Iterator[Any]) -> Any:
        """The next sample or END; its draws are keyed by its number in the epoch."""
        offset = self.position - self.epoch_start
        with self._drawing(offset, self.quiet):
            try:
                return next(source, END)
            except Exception as error:
                where = f"data.source: sample {offset} (epoch {self.epoch})"
                raise load_error(where, error) from error

    def _join(self, start: int, count: int, kept: dict[int, list[Any]]) -> StepBatch:
        cut = cut_step(start, None, count, self.micro_batch)
        mine = [m for m in cut if m.index in kept]
        loaded = []
        for m in mine:
            where = f"positions {m.start} … {m.stop - 1} (epoch {self.epoch})"
            with self._drawing(("collate", m.start), self.quiet and self.collate is None):
                value = join(kept[m.index], self.collate, where)
            loaded.append(LoadedMicroBatch(m.index, m.start, m.stop, value))
        ids = [tuple(range(m.start - self.epoch_start, m.stop - self.epoch_start)) for m in mine]
        return StepBatch(tuple(loaded), start, start + count, len(cut), self.epoch, tuple(ids))
