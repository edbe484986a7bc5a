"""Retries of unreadable samples, which are then left out of their micro-batch.

Imported only after a read has failed.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from typing import Any, Protocol, TypeVar

from shoal.base.errors import ShoalError
from shoal.data.loading.dataset_kind import is_transient, load_error

T = TypeVar("T")
PAUSES_S = (0.1, 0.5, 2.0)
"""Seconds of pause before the second, the third and the last try of a failed read."""
LEFT_OUT = object()
"""Marker in place of an unreadable sample."""


@dataclass(frozen=True)
class UnreadableSample:
    """A sample whose first read failed.

    Attributes:
        sample: its index in the user's dataset.
        position: position in the stream.
        epoch: epoch, from 0.
        failures: failed tries.
        error: text of the last error.
        left_out: all tries failed: the sample is not in the micro-batch.
    """

    sample: int
    position: int
    epoch: int
    failures: int
    error: str
    left_out: bool

    @property
    def text(self) -> str:
        """One line on the sample and its error."""
        where = f"data.source: sample {self.sample} (epoch {self.epoch}, position {self.position})"
        return f"{where}: {self.error}"


class SampleFetcher(Protocol):
    """Interface of a fetcher (`fetch.py`) for retries."""

    samples: int
    leaves_out: bool
    mark: Callable[[int], None] | None
    misread: list[UnreadableSample]

    def ids(self, start: int, stop: int) -> Sequence[int]:
        """Return the dataset indices of stream positions."""

    def own_ids(self, start: int, stop: int) -> Sequence[int]:
        """Return the same as the user's indices."""

    def one(self, index: int, epoch: int) -> Any:
        """Load a sample, with its own seed."""


def read_with_retries(read: Callable[[], T], failed: Callable[[Exception], None]) -> T:
    """Return the result of `read`, after up to four tries with pauses between.

    A slow file system must not end a run of days.

    Args:
        failed: called after each failed try, the last one included.

    Raises:
        Exception: an error of `read` that no retry can mend, at once; else that of the last try.
    """
    for pause_s in PAUSES_S:
        try:
            return read()
        except Exception as error:
            failed(error)
            if not is_transient(error):
                raise
        time.sleep(pause_s)
    try:
        return read()
    except Exception as error:
        failed(error)
        raise


def retry_positions(
    fetcher: SampleFetcher, start: int, stop: int, at: int, first: Exception
) -> list[Any]:
    """Read positions start … stop − 1 one by one, each with its own seed, some in a retry.

    Args:
        at, first: the failed position, and its error.

    Raises:
        UserError: as the fetcher, in whose `misread` failed reads are recorded.
    """
    if not is_transient(first):
        raise _failed(fetcher, at, first) from first
    epoch, found = start // fetcher.samples, []
    for place, index in enumerate(fetcher.ids(start, stop), start):
        if fetcher.mark is not None:
            fetcher.mark(place)
        failed = [first] if place == at else []
        try:
            sample = read_with_retries(partial(fetcher.one, index, epoch), failed.append)
        except Exception as error:
            if not (fetcher.leaves_out and is_transient(error)):
                raise _failed(fetcher, place, error) from error
            sample = LEFT_OUT
        found.append(sample)
        if failed:
            (known,) = fetcher.own_ids(place, place + 1)
            said = f"{type(failed[-1]).__name__}: {failed[-1]}"
            gone = sample is LEFT_OUT
            fetcher.misread.append(UnreadableSample(known, place, epoch, len(failed), said, gone))
    return found


def _failed(fetcher: SampleFetcher, place: int, error: Exception) -> ShoalError:
    (known,) = fetcher.own_ids(place, place + 1)
    epoch = place // fetcher.samples
    return load_error(f"data.source: sample {known} (epoch {epoch}, position {place})", error)


def drop_unreadable(samples: list[Any], sizes: list[int]) -> tuple[list[Any], list[int]]:
    """Return samples and micro-batch sizes without those that were left out."""
    parts = iter(samples)
    left = [[s for s in islice(parts, size) if s is not LEFT_OUT] for size in sizes]
    return [sample for part in left for sample in part], [len(part) for part in left]


@dataclass(frozen=True)
class LateSample:
    """Result of the retries of a stream's sample whose first read failed.

    Attributes:
        sample: the sample from a retry, or LEFT_OUT.
        failures: failed tries.
        error: text of the last error, and its place.
    """

    sample: Any
    failures: int
    error: str


class StreamReader(Protocol):
    """Interface of a reader of streams (`shard_reader.py`, `epoch_reader.py`) for retries."""

    leaves_out: bool
    known: tuple[int, Any]
    end: Any

    def seek(self, at: int) -> None:
        """Restart from the last known position, and go to sample `at`."""

    def stands(self) -> int:
        """Return the number of the next sample."""

    def once(self) -> Any:
        """Read the next sample, or END, in one try."""

    def state_text(self) -> Any:
        """Return the reader's state as its position; None if the state is not exact."""

    def skip_to(self, place: Any) -> None:
        """Go to a position that is one sample further."""

    def read_error(self, error: Exception, why: str) -> ShoalError:
        """Return the one-line error for an unreadable sample that cannot be left out."""


def retry_next_sample(reader: StreamReader, where: str, first: Exception) -> Any:
    """Read a stream's next sample in a retry; if all fail, skip it.

    A stream has no index: it is restarted from its last known place and read up to the sample. If
    its state has another place after the failure than before, that place is after the sample.

    Args:
        where: description of the sample's position.

    Returns:
        Late, or END.

    Raises:
        UserError: as the reader, if no retry can mend the error or the sample cannot be skipped.
    """
    at, failed, before = reader.stands(), [first], [None]

    def again() -> Any:
        reader.seek(at)
        known, place = reader.known
        if known < at or place is None:  # a restored place is valid once the reader has moved
            place = copy.deepcopy(reader.state_text())
        before[:] = [place]
        return reader.once()

    try:
        sample = read_with_retries(again, failed.append)
    except Exception as error:
        if not (reader.leaves_out and is_transient(error)):
            raise reader.read_error(error, "") from error
        place = reader.state_text()
        if reader.stands() != at or place is None or place == before[0]:
            why = "; the stream does not say where it goes on behind it, so it is not left out"
            raise reader.read_error(error, why) from error
        reader.skip_to(place)
        sample = LEFT_OUT
    said = f"{where}: {type(failed[-1]).__name__}: {failed[-1]}"
    return sample if sample is reader.end else LateSample(sample, len(failed), said)


def split_late_samples(samples: list[Any]) -> tuple[list[Any], list[tuple[int, int, str, bool]]]:
    """Split samples into readable ones and (place, failures, error, left out) of late ones."""
    late = [(place, one) for place, one in enumerate(samples) if isinstance(one, LateSample)]
    told = [(at, one.failures, one.error, one.sample is LEFT_OUT) for at, one in late]
    read = [one.sample if isinstance(one, LateSample) else one for one in samples]
    return [one for one in read if one is not LEFT_OUT], told


def report_retried(
    misread: Sequence[UnreadableSample], before: int, tell: Callable[[str], None] | None
) -> tuple[UnreadableSample, ...]:
    """Report samples that a retry could read, and return those that none could.

    Args:
        before: number of earlier ones: only the 1st, 2nd, 4th, 8th … is reported.
    """
    again = [one for one in misread if not one.left_out]
    for number, one in enumerate(again, before + 1):
        if number & (number - 1) == 0:
            tries = "1 try" if one.failures == 1 else f"{one.failures} tries"
            count = "the first" if number == 1 else f"no. {number}"
            told = f"{one.text}: is tried again, and was read after {tries}; {count} such sample"
            (tell or logging.getLogger("shoal").warning)(told)
    return tuple(one for one in misread if one.left_out)


def remaining_micro_batches(
    lost: Sequence[UnreadableSample],
    positions: Sequence[Iterable[int]],
    micro_batches: Sequence[T],
    ids: Sequence[tuple[int, ...]],
) -> tuple[list[T], tuple[tuple[int, ...], ...]]:
    """Return micro-batches that still have a sample, and the indices of their samples.

    Args:
        positions: stream positions of the samples of each micro-batch, lost ones included.
    """
    gone = {one.position for one in lost}
    places = [[position not in gone for position in each] for each in positions]
    pairs = zip(ids, places, strict=True)
    kept = tuple(tuple(compress(own, held)) for own, held in pairs if any(held))
    return [*compress(micro_batches, map(any, places))], kept
