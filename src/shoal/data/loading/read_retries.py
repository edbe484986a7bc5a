"""Samples that cannot be read at once: tried again, then left out of their micro-batch.

Loaded where a read has failed, and not before.
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
from shoal.data.loading.dataset_kind import load_error, may_pass

T = TypeVar("T")
PAUSES_S = (0.1, 0.5, 2.0)
"""Before the second, the third and the last try of a read that failed."""
LEFT_OUT = object()
"""In the place of a sample that could not be read."""


@dataclass(frozen=True)
class Misread:
    """A sample that could not be read at the first try.

    Attributes:
        sample: its index, as a person knows it.
        position: in the stream.
        epoch: of it, from 0.
        failures: tries that did not go well.
        error: the last one's, in words.
        left_out: none did: nothing of it is in the micro-batch.
    """

    sample: int
    position: int
    epoch: int
    failures: int
    error: str
    left_out: bool

    @property
    def text(self) -> str:
        """It, in one line."""
        where = f"data.source: sample {self.sample} (epoch {self.epoch}, position {self.position})"
        return f"{where}: {self.error}"


class Reads(Protocol):
    """What of a fetcher (`fetch.py`) is asked."""

    samples: int
    leaves_out: bool
    mark: Callable[[int], None] | None
    misread: list[Misread]

    def ids(self, start: int, stop: int) -> Sequence[int]:
        """Dataset indices of stream positions."""

    def own_ids(self, start: int, stop: int) -> Sequence[int]:
        """The same as a person knows them."""

    def one(self, index: int, epoch: int) -> Any:
        """A sample, with its own seed."""


def read_patiently(read: Callable[[], T], failed: Callable[[Exception], None]) -> T:
    """Give what `read` gives, at one of up to four tries with pauses between.

    A file system that answers late must not end a run of days.

    Args:
        failed: hears of each try that did not go well, the last one included.

    Raises:
        those that no further try can mend, at once; else those of the last try.
    """
    for pause_s in PAUSES_S:
        try:
            return read()
        except Exception as error:
            failed(error)
            if not may_pass(error):
                raise
        time.sleep(pause_s)
    try:
        return read()
    except Exception as error:
        failed(error)
        raise


def read_again(fetcher: Reads, start: int, stop: int, at: int, first: Exception) -> list[Any]:
    """Read positions start … stop − 1 one by one, each with its own seed, some at a further try.

    Args:
        at, first: what failed until now, and how.

    Raises:
        as of the fetcher, whose `misread` are noted.
    """
    if not may_pass(first):
        raise _failed(fetcher, at, first) from first
    epoch, found = start // fetcher.samples, []
    for place, index in enumerate(fetcher.ids(start, stop), start):
        if fetcher.mark is not None:
            fetcher.mark(place)
        failed = [first] if place == at else []
        try:
            sample = read_patiently(partial(fetcher.one, index, epoch), failed.append)
        except Exception as error:
            if not (fetcher.leaves_out and may_pass(error)):
                raise _failed(fetcher, place, error) from error
            sample = LEFT_OUT
        found.append(sample)
        if failed:
            (known,) = fetcher.own_ids(place, place + 1)
            said = f"{type(failed[-1]).__name__}: {failed[-1]}"
            gone = sample is LEFT_OUT
            fetcher.misread.append(Misread(known, place, epoch, len(failed), said, gone))
    return found


def _failed(fetcher: Reads, place: int, error: Exception) -> ShoalError:
    (known,) = fetcher.own_ids(place, place + 1)
    epoch = place // fetcher.samples
    return load_error(f"data.source: sample {known} (epoch {epoch}, position {place})", error)


def without_lost(samples: list[Any], sizes: list[int]) -> tuple[list[Any], list[int]]:
    """The same samples, and sizes of the micro-batches, without those that were left out."""
    parts = iter(samples)
    left = [[s for s in islice(parts, size) if s is not LEFT_OUT] for size in sizes]
    return [sample for part in left for sample in part], [len(part) for part in left]


@dataclass(frozen=True)
class Late:
    """In the place of a stream's sample that could not be read at once.

    Attributes:
        sample: as it was read at a further try, or LEFT_OUT.
        failures: tries that did not go well.
        error: the last one's, in words, and where it was.
    """

    sample: Any
    failures: int
    error: str


class ReadsStream(Protocol):
    """What of a reader of streams (`shard_reader.py`, `epoch_reader.py`) is asked."""

    leaves_out: bool
    known: tuple[int, Any]
    end: Any

    def stand(self, at: int) -> None:
        """Begin anew from the last place that is known, and stand before sample `at`."""

    def stands(self) -> int:
        """Before which sample it stands."""

    def once(self) -> Any:
        """The next sample, or END, at one try."""

    def place(self) -> Any:
        """What its own state says of where it stands; None where it does not say it exactly."""

    def pass_over(self, place: Any) -> None:
        """Go to a place that was told, one sample behind where it stood."""

    def failed(self, error: Exception, why: str) -> ShoalError:
        """The one line of a sample that cannot be read, and why it is not left out."""


def pull_again(reader: ReadsStream, where: str, first: Exception) -> Any:
    """Read a stream's next sample at a further try; where none goes well, step over it.

    A stream has no index: it is begun anew from its last known place and read up to the sample.
    Where its state says another place after the failure than before, that is behind the sample.

    Args:
        where: of the sample, in words.

    Returns:
        Late, or END.

    Raises:
        as of the reader, for what no try can mend, and for what cannot be stepped over.
    """
    at, failed, before = reader.stands(), [first], [None]

    def again() -> Any:
        reader.stand(at)
        known, place = reader.known
        if known < at or place is None:  # one that it was put to is told once it has moved
            place = copy.deepcopy(reader.place())
        before[:] = [place]
        return reader.once()

    try:
        sample = read_patiently(again, failed.append)
    except Exception as error:
        if not (reader.leaves_out and may_pass(error)):
            raise reader.failed(error, "") from error
        place = reader.place()
        if reader.stands() != at or place is None or place == before[0]:
            why = "; the stream does not say where it goes on behind it, so it is not left out"
            raise reader.failed(error, why) from error
        reader.pass_over(place)
        sample = LEFT_OUT
    said = f"{where}: {type(failed[-1]).__name__}: {failed[-1]}"
    return sample if sample is reader.end else Late(sample, len(failed), said)


def told_apart(samples: list[Any]) -> tuple[list[Any], list[tuple[int, int, str, bool]]]:
    """What could be read, and of what came late: place, failures, error, whether it is left out."""
    late = [(place, one) for place, one in enumerate(samples) if isinstance(one, Late)]
    told = [(at, one.failures, one.error, one.sample is LEFT_OUT) for at, one in late]
    read = [one.sample if isinstance(one, Late) else one for one in samples]
    return [one for one in read if one is not LEFT_OUT], told


def told_and_lost(
    misread: Sequence[Misread], before: int, tell: Callable[[str], None] | None
) -> tuple[Misread, ...]:
    """Tell of samples that were read at a further try, and give those that never were.

    Args:
        before: how many were told or passed over until now: the 1st, 2nd, 4th, 8th … is told.
    """
    again = [one for one in misread if not one.left_out]
    for number, one in enumerate(again, before + 1):
        if number & (number - 1) == 0:
            tries = "1 try" if one.failures == 1 else f"{one.failures} tries"
            count = "the first" if number == 1 else f"no. {number}"
            told = f"{one.text}: is tried again, and was read after {tries}; {count} such sample"
            (tell or logging.getLogger("shoal").warning)(told)
    return tuple(one for one in misread if one.left_out)


def what_is_left(
    lost: Sequence[Misread],
    positions: Sequence[Iterable[int]],
    micro_batches: Sequence[T],
    ids: Sequence[tuple[int, ...]],
) -> tuple[list[T], tuple[tuple[int, ...], ...]]:
    """Micro-batches that hold a sample, and the indices of what they hold.

    Args:
        positions: of the samples of each micro-batch in the stream, the lost ones too.
    """
    gone = {one.position for one in lost}
    places = [[position not in gone for position in each] for each in positions]
    pairs = zip(ids, places, strict=True)
    kept = tuple(tuple(compress(own, held)) for own, held in pairs if any(held))
    return [*compress(micro_batches, map(any, places))], kept
