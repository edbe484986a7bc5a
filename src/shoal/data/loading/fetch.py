"""Load the samples of one step and join them.

Random draws of a sample depend on the sample alone (`sample_seeds.py`). Exceptions: draws on a GPU,
and `numpy.random.default_rng()` without a seed. Datasets with `draws_nothing = True` skip the
seeding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from operator import attrgetter, length_hint
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from shoal.data.loading.dataset_kind import Collate, join_samples
from shoal.data.loading.sample_order import samples_at
from shoal.data.loading.sample_seeds import DrawSeeder, draws_nothing

if TYPE_CHECKING:
    from shoal.data.loading.read_retries import UnreadableSample

Span = tuple[int, int]
"""Stream positions of one micro-batch: start, stop."""

BLOCK = 8192
"""Positions looked up at a time: 0.4 ms for 8192, 0.06 ms for 8."""


class NonUniformSamplesError(Exception):
    """Samples that differ in kind or dtype, or whose kind only torch can join."""


def join_uniform(samples: Sequence[Any]) -> Any:
    """Join samples as default_collate does, if slices of the result equal its joined slices.

    This holds for tensors, arrays, numbers, texts, and tuples, lists and dicts of them, each of one
    kind and dtype in all samples. Otherwise torch promotes dtypes by all samples that it joins.

    Raises:
        NonUniformSamplesError: the samples differ in kind or dtype; torch's own error if shapes
        differ.
    """
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor:
        stacked = _stacked(samples)
        if type(stacked) is torch.Tensor:  # one of another kind gives its own
            return stacked
        raise NonUniformSamplesError
    if len(set(map(type, samples))) > 1:
        raise NonUniformSamplesError
    if kind is tuple or kind is list:
        return [join_uniform(column) for column in zip(*samples, strict=True)]
    if kind is dict:
        if any(sample.keys() != first.keys() for sample in samples):
            raise NonUniformSamplesError
        return {key: join_uniform([sample[key] for sample in samples]) for key in first}
    if kind is np.ndarray and first.dtype.kind in "biufc":
        return _stacked([torch.as_tensor(sample) for sample in samples])
    if kind in (str, bytes):
        return samples  # torch joins no texts
    if kind in (int, float, bool):
        return torch.tensor(samples, dtype=torch.float64 if kind is float else None)
    raise NonUniformSamplesError


def _stacked(tensors: Sequence[Any]) -> Any:
    """Stack tensors of one dtype, in a worker into shared memory."""
    if len(set(map(_dtype, tensors))) > 1 or tensors[0].layout is not torch.strided:
        raise NonUniformSamplesError
    # Here at once, 5 µs sooner than by way of what torch looks up for each kind.
    return (
        torch.stack(list(tensors)) if get_worker_info() is None else default_collate(list(tensors))
    )


_dtype = attrgetter("dtype")


@dataclass(frozen=True)
class FetchedMicroBatches:
    """Micro-batches from a fetcher: one value for all, or a list of values.

    Attributes:
        sizes: samples of each micro-batch, if all are joined to one value: a process then sends one
            tensor instead of many.
        misread: samples whose first read failed; a micro-batch that lost all samples has an
            arbitrary value.
    """

    value: Any
    sizes: list[int] | None = None
    misread: tuple[UnreadableSample, ...] = ()

    def micro_batches(self) -> list[Any]:
        """Return the joined samples of each micro-batch; tensors are views of the received ones."""
        return self.value if self.sizes is None else _parts(self.value, self.sizes)


def _parts(value: Any, sizes: list[int]) -> list[Any]:
    """Split the default_collate result of uniform samples along the samples."""
    if type(value) is torch.Tensor:  # as `join_uniform` makes them; isinstance takes 0.5 µs
        return list(torch.unsafe_split_with_sizes(value, sizes))  # autograd need not track views
    if isinstance(value, dict):
        columns = {key: _parts(column, sizes) for key, column in value.items()}
        return [{key: cut[n] for key, cut in columns.items()} for n in range(len(sizes))]
    if value and isinstance(value[0], str | bytes):
        ends = list(accumulate(sizes, initial=0))
        return [value[start:stop] for start, stop in pairwise(ends)]
    fields = [_parts(field, sizes) for field in value]
    return [list(part) for part in zip(*fields, strict=True)] if fields else [[] for _ in sizes]


class Fetcher:
    """Fetcher of stream positions of a map-style dataset; the same bits in any process.

    `fetcher.values(spans)` returns joined micro-batches. Raises a UserError that names the sample,
    its epoch and its position. With `leaves_out`, a sample with a ClusterError (disk or connection)
    is left out instead.
    """

    leaves_out = False

    def __init__(
        self,
        dataset: Any,
        samples: int,
        seed: int,
        shuffle: bool,
        collate: Collate | None,
        order: Callable[..., Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle
        self.collate = collate
        self._is_quiet = draws_nothing(dataset)
        # Optional: indices → the result of `join_uniform` of these samples, in one call.
        self._read_joined = getattr(dataset, "read_joined", None)
        self._order = order
        self._whole_index = getattr(dataset, "whole_index", None)
        self._draws = DrawSeeder()
        self.mark: Callable[[int], None] | None = None
        self.misread: list[UnreadableSample] = []
        self._block_start = 0
        self._block: tuple[int, ...] = ()

    def reorder(self, order: Callable[..., Any]) -> None:
        """Use another order of the samples from here on, as `order` in the constructor."""
        self._order, self._block = order, ()

    def ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the dataset indices of stream positions start … stop − 1, all of one epoch."""
        if start < self._block_start or stop > self._block_start + len(self._block):
            epoch_stop = (start // self.samples + 1) * self.samples
            ahead = max(stop, min(start + BLOCK, epoch_stop))
            if self._order is not None:
                block = self._order(start, ahead, self.seed, shuffle=self.shuffle)
            else:
                _, block = samples_at(start, ahead, self.samples, self.seed, shuffle=self.shuffle)
            self._block, self._block_start = tuple(block.tolist()), start
        return self._block[start - self._block_start : stop - self._block_start]

    def own_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the same as the user's indices: those before a part was held out."""
        ids, whole = self.ids(start, stop), self._whole_index
        return ids if whole is None else tuple(int(whole(index)) for index in ids)

    def own_ids_of_spans(self, spans: Sequence[Span]) -> tuple[tuple[int, ...], ...]:
        """Return `own_ids` of some micro-batches of one step."""
        if not spans or self._whole_index is not None:
            return tuple(self.own_ids(*span) for span in spans)
        self.ids(spans[0][0], spans[-1][1])
        block, front = self._block, self._block_start  # which has all of them now
        return tuple([block[start - front : stop - front] for start, stop in spans])

    def values(self, spans: Sequence[Span]) -> FetchedMicroBatches:
        """Load and join the samples of some micro-batches, each (start, stop) in the stream."""
        if self._is_quiet and self.collate is None:
            if self._read_joined is not None and get_worker_info() is None:
                return self._joined_at_once(self._read_joined, spans)
            return self._joined(spans)
        return self._draws.run(lambda: self._joined(spans))

    def _joined_at_once(
        self, read: Callable[[Sequence[int]], Any], spans: Sequence[Span]
    ) -> FetchedMicroBatches:
        """Return the samples of some micro-batches from a dataset that joins them itself."""
        ids = [index for span in spans for index in self.ids(*span)]
        return FetchedMicroBatches(read(ids), [stop - start for start, stop in spans])

    def _joined(self, spans: Sequence[Span]) -> FetchedMicroBatches:
        self.misread = []
        sizes = [stop - start for start, stop in spans]
        first, last = spans[0][0], spans[-1][1]
        if sum(sizes) == last - first:
            samples = self._samples(first, last)
        else:  # other ranks have what lies between
            samples = [sample for span in spans for sample in self._samples(*span)]
        if self.misread:
            from shoal.data.loading.read_retries import drop_unreadable

            samples, sizes = drop_unreadable(samples, sizes)
        misread = tuple(self.misread)
        if self.collate is None and samples:
            try:
                return FetchedMicroBatches(join_uniform(samples), sizes, misread)
            except Exception:  # told below, of the micro-batch
                pass
        parts, own = iter(samples), zip(spans, sizes, strict=True)
        values = [self._join(*span, [*islice(parts, n)]) if n else None for span, n in own]
        return FetchedMicroBatches(values, None, misread)

    def _join(self, start: int, stop: int, samples: list[Any]) -> Any:
        self._draws.seed(self.seed, "collate", start)
        epoch = start // self.samples
        return join_samples(
            samples, self.collate, f"positions {start} … {stop - 1} (epoch {epoch})"
        )

    def _samples(self, start: int, stop: int) -> list[Any]:
        epoch, dataset, mark = start // self.samples, self.dataset, self.mark
        places = iter(self.ids(start, stop))
        plain = self._is_quiet or self._draws.only_watches
        try:
            if mark is not None:  # it gives None
                told = zip(range(start, stop), places, strict=True)
                if plain:
                    return [dataset[index] for place, index in told if not mark(place)]
                return [dataset[self._seeded(i, epoch)] for place, i in told if not mark(place)]
            if plain:
                return [dataset[index] for index in places]
            return [dataset[self._seeded(index, epoch)] for index in places]
        except Exception as error:
            place = stop - 1 - length_hint(places)
            from shoal.data.loading.read_retries import retry_positions

            return retry_positions(self, start, stop, place, error)

    def one(self, index: int, epoch: int) -> Any:
        """Load a sample, with its own seed."""
        return self.dataset[index if self._is_quiet else self._seeded(index, epoch)]

    def _seeded(self, index: int, epoch: int) -> int:
        self._draws.seed(self.seed, epoch, index)
        return index
