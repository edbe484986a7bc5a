"""Read one epoch of an iterable step by step, in the main process or in one worker process.

    sample, sample, … ──cut into batches──> ReadStep(this rank's micro-batches, state, ended)

The state is the iterable's own, as JSON text, after the step's last sample and before the
prefetched one. It travels with the step, so that prefetching in a worker does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from shoal.base.errors import ClusterError, ConfigError, ShoalError, UserError
from shoal.base.plans.batches import cut_step
from shoal.data.loading.dataset_kind import (
    Collate,
    digest_of,
    is_transient,
    join_samples,
    load_error,
)
from shoal.data.loading.sample_seeds import draws_nothing, seeded_rng
from shoal.data.loading.step_samples import LoadedMicroBatch, StepBatch
from shoal.data.loading.worker_pool import WorkerFailure

if TYPE_CHECKING:
    from shoal.data.loading.read_retries import UnreadableSample

END = object()
"""Marker in place of a sample at the end of a stream."""
NO_STATE = "; it has no state_dict() and load_state_dict(), by which the read were tried again"
IN_BUFFER = "; its state leaves out what its shuffle buffer holds, so it is not read again"


@dataclass(frozen=True)
class ReadStep:
    """One step as read, with the iterable's state after it, and whether the epoch ended.

    Attributes:
        misread: samples whose first read failed.
    """

    batch: StepBatch
    state: str
    ended: bool
    misread: tuple[UnreadableSample, ...] = ()


def is_resumable(iterable: object) -> bool:
    """Return whether the iterable has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(iterable, n, None)) for n in ("state_dict", "load_state_dict"))


def _state_text(iterable: Any) -> str:
    """Return the iterable's state as JSON text, a copy that later reading cannot change."""
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
    """Reader of the steps of one epoch of an iterable, from stream position `position` on.

    Args:
        epoch, epoch_start: the epoch, and its start position, from which samples are numbered.
        batch, micro_batch, rank, degree, collate, seed, leaves_out: as for Loader.

    Returns:
        ReadSteps; or, as the last, a Failure with the user's own error.
    """

    end = END

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
        leaves_out: bool = False,
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
        self.leaves_out = leaves_out and degree == 1  # another rank would keep what this one lost
        self.quiet = draws_nothing(iterable)
        self._misread: list[UnreadableSample] = []
        self._lose = self._anew = False
        self.known: tuple[int, Any] = position, "null"
        self._at = position
        self.probed: list[str] = []
        self._probing = degree > 1

    def __iter__(self) -> Iterator[ReadStep | WorkerFailure]:
        """Yield the steps from `position` to the end of the epoch."""
        try:
            yield from self._steps()
        except (UserError, ClusterError) as error:
            yield WorkerFailure.of(error)

    def _steps(self) -> Iterator[ReadStep]:
        self.known = self.position, self._state_before()
        self._open()
        first = self._next()
        if first is END and self.position == self.epoch_start and is_resumable(self.iterable):
            # its state was taken at the end of an epoch, of which no sample is left
            self._anew = True
            self._open()
            first = self._next()
        while first is not END:
            start = self.position
            count, kept, sample = self._read(first)
            state = _state_text(self.iterable)
            self.known = self.position, state
            misread, self._misread = tuple(self._misread), []
            first = END if sample is END else self._next()
            batch = self._join(start, count, kept)
            if self.probed:
                probe = (f"the first {count} samples", digest_of(self.probed))
                batch, self.probed = replace(batch, probe=probe), []
            yield ReadStep(batch, state, first is END, misread)

    def _read(self, sample: Any) -> tuple[int, dict[int, list[Any]], Any]:
        """Read one step: (sample count, own samples by micro-batch, last sample or END)."""
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
            sample = self._next()
            if sample is END:
                return count, kept, END

    def _seeded_draws(self, what: object, quiet: bool) -> AbstractContextManager[None]:
        """Seed random draws by (seed, epoch, what), and restore the generators afterwards."""
        return nullcontext() if quiet else seeded_rng(self.seed, self.epoch, what)

    def _state_before(self) -> str:
        """Return the iterable's state at the start, "null" if it has none before it runs."""
        try:
            return _state_text(self.iterable)
        except Exception:  # the user's error; reported when the state is needed
            return "null"

    def _open(self) -> None:
        with self._seeded_draws("start", self.quiet):
            self._source = iter(self.iterable)

    def _next(self) -> Any:
        """Return the next sample or END; LEFT_OUT if several tries failed."""
        self._at = self.position
        try:
            return self.once()
        except Exception as error:
            if not is_transient(error):
                raise self.read_error(error) from error
            return self._retry_read(error)

    def _retry_read(self, error: Exception) -> Any:
        from shoal.data.loading.hf_layers import is_streaming, shuffle_buffer_samples
        from shoal.data.loading.read_retries import (
            LEFT_OUT,
            LateSample,
            UnreadableSample,
            retry_next_sample,
        )

        if self.known[1] == "null":
            why = "" if is_resumable(self.iterable) else NO_STATE
            raise self.read_error(error, why) from error
        if is_streaming(self.iterable) and shuffle_buffer_samples(self.iterable):
            raise self.read_error(error, IN_BUFFER) from error
        number = self._at - self.epoch_start
        got = retry_next_sample(self, type(self.iterable).__name__, error)
        if not isinstance(got, LateSample):
            return got
        gone = got.sample is LEFT_OUT
        self._lose = self._lose or gone
        told = UnreadableSample(number, self._at, self.epoch, got.failures, got.error, gone)
        self._misread.append(told)
        return got.sample

    def once(self) -> Any:
        """Read the next sample or END, in one try; its seed is its number in the epoch."""
        with self._seeded_draws(self._at - self.epoch_start, self.quiet):
            return next(self._source, END)

    def stands(self) -> int:
        """Return the stream position of the next sample."""
        return self._at

    def seek(self, at: int) -> None:
        """Restart from the last saved state, then read and discard items up to position `at`."""
        self._at, state = self.known
        self.iterable.load_state_dict(json.loads(state))
        self._open()
        if self._anew and self._at == self.epoch_start:
            next(self._source, END)
            self._open()
        while self._at < at and self.once() is not END:
            self._at += 1

    def state_text(self) -> Any:
        """Return the iterable's present state as JSON text."""
        return _state_text(self.iterable)

    def skip_to(self, place: Any) -> None:
        """Continue from a state that is one sample further."""
        self.known = self._at + 1, place
        self.iterable.load_state_dict(json.loads(place))
        self._open()

    def read_error(self, error: Exception, why: str = "") -> ShoalError:
        """Return the one-line error for the next sample, which is unreadable."""
        where = f"sample {self._at - self.epoch_start} (epoch {self.epoch})"
        return load_error(f"data.source: {where}{why}", error)

    def _join(self, start: int, count: int, kept: dict[int, list[Any]]) -> StepBatch:
        cut = cut_step(start, None, count, self.micro_batch)
        mine = [m for m in cut if m.index in kept]
        loaded = []
        for m in mine:
            where = f"positions {m.start} … {m.stop - 1} (epoch {self.epoch})"
            with self._seeded_draws(("collate", m.start), self.quiet and self.collate is None):
                value = self._joined(kept[m.index], where)
            loaded.append(LoadedMicroBatch(m.index, m.start, m.stop, value))
        ids = [tuple(range(m.start - self.epoch_start, m.stop - self.epoch_start)) for m in mine]
        return StepBatch(tuple(loaded), start, start + count, len(cut), self.epoch, tuple(ids))

    def _joined(self, samples: list[Any], where: str) -> Any:
        if self._lose:
            from shoal.data.loading.read_retries import LEFT_OUT

            samples = [one for one in samples if one is not LEFT_OUT]
            if not samples:
                return None
        return join_samples(samples, self.collate, where)
