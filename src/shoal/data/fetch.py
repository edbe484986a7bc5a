"""Fetches the samples of one step and joins them, here or in worker processes.

What a sample draws at random depends on the sample alone (`seeding.py`). Not covered: draws on a
GPU, and `numpy.random.default_rng()` without a seed. Datasets with `draws_nothing = True` skip it.

Worker processes are torch's own. They die with their parent, even a killed one.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from operator import attrgetter, length_hint
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from shoal.base.errors import ClusterError, ConfigError, ShoalError, UserError
from shoal.data.order import samples_at
from shoal.data.seeding import Draws, draws_nothing, kept_draws, seeded_draws

Collate = Callable[[list[Any]], Any]

Span = tuple[int, int]
"""Stream positions of one micro-batch: start, stop."""

PR_SET_PDEATHSIG = 1

BLOCK = 8192
"""Positions looked up at once: 1 ms for 8192, 0.2 ms for 8."""


PERMANENT = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
"""Error numbers that a further attempt meets again; decoders raise OSError without a number."""


def load_error(what: str, error: Exception) -> ShoalError:
    """The one line for an exception in the user's own data code, with its traceback as a note.

    Gives   UserError; ClusterError where a disk, a mount or a connection is at fault, which may
            work again after a restart
    """
    lost = isinstance(error, ConnectionError | TimeoutError)
    transient = lost or (isinstance(error, OSError) and error.errno not in PERMANENT)
    kind: type[ShoalError] = ClusterError if transient else UserError
    wrapped = kind(f"{what}: {type(error).__name__}: {error}")
    wrapped.add_note("".join(traceback.format_exception(error)))
    return wrapped


def digest_of(value: Any) -> str:
    """Hash tensors, arrays, numbers and texts, however nested, to 24 hex digits.

    Values of other kinds (object arrays, sets, most numpy scalars) are passed over.
    """
    total = hashlib.blake2b(digest_size=12)
    _digest_into(total, value)
    return total.hexdigest()


def _digest_into(total: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        total.update(f"{value.dtype} {list(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        total.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        _digest_into(total, [part for pair in sorted(value.items(), key=repr) for part in pair])
    elif isinstance(value, list | tuple):
        total.update(f"{len(value)}".encode())
        for part in value:
            _digest_into(total, part)
    elif value is None or isinstance(value, str | bytes | int | float):
        total.update(repr(value).encode())


def identity_of(dataset: Any) -> list[Any] | None:
    """Returns a dataset's length and hashes of its first and last sample; None where it raises.

    Both samples are loaded with fixed seeds, and the generators are put back afterwards.
    """
    try:
        with seeded_draws("identity"):
            count = len(dataset)
            return [count, digest_of(dataset[0]), digest_of(dataset[count - 1])]
    except Exception:
        return None


def sample_kind(dataset: Any) -> str:
    """Returns what a dataset's first sample has as inputs: images, numbers, or tokens.

    images   floats of two dims or more · numbers  floats of fewer
    tokens   whole numbers, and whatever is unknown: an iterable, which is not read, or a sample
             that is no tensor or fails
    The first sample is loaded; the generators are put back afterwards.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return "tokens"
    try:
        with kept_draws():
            first = dataset[0]
        inputs = torch.as_tensor(first[0] if isinstance(first, tuple | list) else first)
    except Exception:
        return "tokens"
    if not inputs.is_floating_point():
        return "tokens"
    return "images" if inputs.ndim > 1 else "numbers"


def join(samples: list[Any], collate: Collate | None, where: str) -> Any:
    """Join a list of samples to one batch; `collate` None is torch's default_collate.

    Errors   UserError that names `where`; ClusterError where a disk or a connection failed
    """
    try:
        return default_collate(samples) if collate is None else collate(samples)
    except Exception as error:
        hint = "" if collate else "; unequal samples need data.collate=pkg.mod:function"
        raise load_error(f"data.collate: joining {where}{hint}", error) from error


def first_samples(data: Any, collate: Collate | None, count: int = 4) -> Any:
    """Join the first `count` samples to a batch; data and generators stay as they were.

    data     map-style, or an iterable with `state_dict()`
    Errors   ConfigError for an iterable that could not be put back; as `join`; the dataset's own
    """
    with kept_draws():
        if is_indexed(data):
            samples = [data[place] for place in range(min(count, len(data)))]
        elif hasattr(data, "state_dict"):
            state = copy.deepcopy(data.state_dict())
            samples = list(islice(iter(data), count))
            data.load_state_dict(state)
        else:
            raise ConfigError(
                "data.source: can only be iterated, so no sample can be looked at without taking "
                "it; nearest: a dataset with __getitem__ and __len__, or with state_dict()"
            )
    return join(samples, collate, "the first samples")


class NotUniform(Exception):
    """Samples that differ in kind or dtype, or are of a kind that only torch knows how to join."""


def join_uniform(samples: Sequence[Any]) -> Any:
    """Join samples as default_collate does, if parts of the result are what it makes of parts.

    So it is for tensors, arrays, numbers, texts, and tuples, lists and dicts of them, each of one
    kind and dtype in all samples: what differs torch promotes, by all that it sees.
    Errors   NotUniform · what torch raises for shapes that differ
    """
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor:
        stacked = _stacked(samples)
        if type(stacked) is torch.Tensor:  # one of another kind gives its own
            return stacked
        raise NotUniform
    if len(set(map(type, samples))) > 1:
        raise NotUniform
    if kind is tuple or kind is list:
        return [join_uniform(column) for column in zip(*samples, strict=True)]
    if kind is dict:
        if any(sample.keys() != first.keys() for sample in samples):
            raise NotUniform
        return {key: join_uniform([sample[key] for sample in samples]) for key in first}
    if kind is np.ndarray and first.dtype.kind in "biufc":
        return _stacked([torch.as_tensor(sample) for sample in samples])
    if kind in (str, bytes):
        return samples  # torch joins no texts
    if kind in (int, float, bool):
        return torch.tensor(samples, dtype=torch.float64 if kind is float else None)
    raise NotUniform


def _stacked(tensors: Sequence[Any]) -> Any:
    """Stack tensors of one dtype, in a worker into memory that it shares."""
    if len(set(map(_dtype, tensors))) > 1 or tensors[0].layout is not torch.strided:
        raise NotUniform
    # Here at once, 5 µs sooner than by way of what torch looks up for each kind.
    return (
        torch.stack(list(tensors)) if get_worker_info() is None else default_collate(list(tensors))
    )


_dtype = attrgetter("dtype")


@dataclass(frozen=True)
class Joined:
    """Micro-batches on their way from who fetched them: one value for all, or a list of values.

    sizes   samples of each micro-batch, where they are joined to one value; a process sends one
            tensor in the place of many
    """

    value: Any
    sizes: list[int] | None = None

    def micro_batches(self) -> list[Any]:
        """The joined samples of each; tensors are views of the ones that came."""
        return self.value if self.sizes is None else _parts(self.value, self.sizes)


def _parts(value: Any, sizes: list[int]) -> list[Any]:
    """Cut what default_collate made of uniform samples, along the samples."""
    if isinstance(value, torch.Tensor):
        return list(torch.unsafe_split_with_sizes(value, sizes))  # nobody needs to know of views
    if isinstance(value, dict):
        columns = {key: _parts(column, sizes) for key, column in value.items()}
        return [{key: cut[n] for key, cut in columns.items()} for n in range(len(sizes))]
    if value and isinstance(value[0], str | bytes):
        ends = list(accumulate(sizes, initial=0))
        return [value[start:stop] for start, stop in pairwise(ends)]
    fields = [_parts(field, sizes) for field in value]
    return [[field[n] for field in fields] for n in range(len(sizes))]


@dataclass(frozen=True)
class Failure:
    """An error on its way from a worker process: its one line, and the traceback there.

    transient   a ClusterError, worth a restart; else a UserError
    """

    line: str
    notes: tuple[str, ...]
    transient: bool = False

    @staticmethod
    def of(error: ShoalError) -> Failure:
        """Pack an error; exceptions themselves lose their notes between processes."""
        notes = tuple(getattr(error, "__notes__", ()))
        return Failure(str(error), notes, isinstance(error, ClusterError))

    def raise_again(self) -> None:
        """Errors: UserError or ClusterError, as it was raised in the worker."""
        kind: type[ShoalError] = ClusterError if self.transient else UserError
        error = kind(self.line)
        for note in self.notes:
            error.add_note(note)
        raise error


class Fetcher:
    """Loads stream positions of a map-style dataset; the same bits in any process.

    `fetcher.values(spans)` are micro-batches, joined. Errors: UserError that names the sample, its
    epoch and its position.
    """

    def __init__(
        self, dataset: Any, samples: int, seed: int, shuffle: bool, collate: Collate | None
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.collate = collate
        self._is_quiet = draws_nothing(dataset)
        self._whole_index = getattr(dataset, "whole_index", None)
        self._draws = Draws()
        self._block_start = 0
        self._block: tuple[int, ...] = ()

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Dataset indices of stream positions start … stop − 1, all of one epoch."""
        if start < self._block_start or stop > self._block_start + len(self._block):
            epoch_stop = (start // self.samples + 1) * self.samples
            ahead = max(stop, min(start + BLOCK, epoch_stop))
            _, block = samples_at(start, ahead, self.samples, self.seed, shuffle=self.shuffle)
            self._block, self._block_start = tuple(block.tolist()), start
        return self._block[start - self._block_start : stop - self._block_start]

    def own_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """The same as a person knows them: indices of the dataset before a part was held out."""
        ids, whole = self.ids(start, stop), self._whole_index
        return ids if whole is None else tuple(int(whole(index)) for index in ids)

    def values(self, spans: Sequence[Span]) -> Joined:
        """The samples of some micro-batches, each (start, stop) in the stream, joined."""
        if self._is_quiet and self.collate is None:
            return self._joined(spans)
        return self._draws.during(lambda: self._joined(spans))

    def _joined(self, spans: Sequence[Span]) -> Joined:
        sizes = [stop - start for start, stop in spans]
        first, last = spans[0][0], spans[-1][1]
        if sum(sizes) == last - first:
            samples = self._samples(first, last)
        else:  # other ranks have what lies between
            samples = [sample for span in spans for sample in self._samples(*span)]
        if self.collate is None:
            with suppress(Exception):  # told below, of the micro-batch
                return Joined(join_uniform(samples), sizes)
        parts = iter(samples)
        return Joined([self._join(*span, [*islice(parts, span[1] - span[0])]) for span in spans])

    def _join(self, start: int, stop: int, samples: list[Any]) -> Any:
        self._draws.seed(self.seed, "collate", start)
        epoch = start // self.samples
        return join(samples, self.collate, f"positions {start} … {stop - 1} (epoch {epoch})")

    def _samples(self, start: int, stop: int) -> list[Any]:
        epoch, dataset = start // self.samples, self.dataset
        places = iter(self.ids(start, stop))
        try:
            if self._is_quiet or self._draws.only_watches:
                return [dataset[index] for index in places]
            return [dataset[self._seeded(index, epoch)] for index in places]
        except Exception as error:
            place = stop - 1 - length_hint(places)
            (known,) = self.own_ids(place, place + 1)
            where = f"data.source: sample {known} (epoch {epoch}, position {place})"
            raise load_error(where, error) from error

    def _seeded(self, index: int, epoch: int) -> int:
        self._draws.seed(self.seed, epoch, index)
        return index


class FetcherView(Dataset[Any]):
    """A fetcher as torch's DataLoader wants it: `view[spans]`, failures as values."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher

    def __getitem__(self, spans: Sequence[Span]) -> Any:
        """Some micro-batches, or the Failure to be raised in the main process."""
        try:
            return self.fetcher.values(spans)
        except (UserError, ClusterError) as error:
            return Failure.of(error)


def obey_parent(_worker: int = 0) -> None:
    """Live exactly as long as the parent wants: its trainer is who answers signals, and may save.

    Ctrl-C is left to the parent. On Linux so is a SIGTERM to the whole group, while one that the
    parent sends itself ends this process; and the kernel kills it when its parent thread ends: else
    it outlived a killed trainer, holding memory, until its next queue check.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not sys.platform.startswith("linux"):
        return
    # A Python handler is not told who sent a signal; waiting for it is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told, daemon=True).start()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the request
        os._exit(1)


def _end_when_told() -> None:
    """Wait for the parent's own SIGTERM."""
    sender = 0
    while sender != os.getppid():
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
    os._exit(0)


def as_it_is(value: Any) -> Any:
    """Keep torch from converting arrays, so that workers and main process give the same types."""
    return value


def from_workers(
    dataset: Dataset[Any], spans: Iterable[Any] | None, workers: int, ahead: int
) -> Iterator[Any]:
    """What `dataset` gives, in order, fetched by `workers` processes, `ahead` results each.

    spans   keys for dataset[key]; None for an iterable dataset
    Errors  those of a Failure among the results · ClusterError if a worker process dies
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=spans,
        num_workers=workers,
        collate_fn=as_it_is,
        worker_init_fn=obey_parent,
        prefetch_factor=ahead,
        generator=torch.Generator(),  # else the DataLoader draws from the model's generator
    )
    results = iter(loader)
    try:
        while True:
            try:
                result = next(results)
            except StopIteration:
                return
            except RuntimeError as error:
                raise ClusterError(
                    f"data.workers = {workers}: {error}; out of memory or shared memory is the "
                    f"usual cause: fewer data.workers, or a smaller train.micro_batch"
                ) from error.with_traceback(None)
            if isinstance(result, Failure):
                result.raise_again()
            yield result
    finally:
        # stops the workers now: left to the garbage collector (a traceback would hold it), torch's
        # queues are closed first and every worker is waited for in vain, 5 s each
        del results


def is_indexed(dataset: object) -> bool:
    """Tell whether a dataset is map-style: has `__getitem__` and `__len__`, no IterableDataset."""
    if isinstance(dataset, IterableDataset):  # inherits a __getitem__ that only raises
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
