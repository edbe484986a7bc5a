"""Inspect DataLoaders of the user's own: how they split data over ranks, and what they read."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from shoal.data.loading.dataset_kind import dataset_identity, digest_of, is_indexed
from shoal.data.loading.sample_seeds import seeded_rng
from shoal.trainer._torch import LoaderIterator, pytree
from shoal.trainer.batches.batch_values import to_tensor

CHANCE_BITS = 32
"""Information from which equal samples are no coincidence."""
LOOKS, LOOK_S = 16, 0.1
"""Samples of a dataset that ranks compare, and seconds for them."""


def count_information_bits(batch: Any) -> float:
    """Return an upper bound of a batch's information in bits: numbers × log2 of distinct values."""
    bits = 0.0
    for leaf in pytree.tree_leaves(batch):
        leaf = to_tensor(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            some = leaf.detach().reshape(-1)[:4096]
            bits += some.numel() * math.log2(max(1, some.unique().numel()))
    return bits


def _list_subclasses(kind: type) -> list[type]:
    """Return a class and all its subclasses."""
    children: list[type] = kind.__subclasses__()
    return [kind, *(found for one in children for found in _list_subclasses(one))]


def describe_loaders(samples: int) -> tuple[dict[str, Any], list[SamplerEpochs]]:
    """Return what ranks compare about the loaders of the current batch, and counts of its epochs.

    Args:
        samples: of the current batch.
    """
    found = list_iterators(samples)
    samplers = list_distributed_samplers(found)
    told = {"loaders": list_unsharded_loaders(found), "rows": list_rows(found)}
    told["samplers"] = [describe_sampler(one) for one in samplers]
    epochs = [SamplerEpochs(one) for one in samplers if one.shuffle]
    return told, [one for one in epochs if not one.repeats(samples)]


def list_iterators(samples: int) -> list[Any]:
    """Return the iterators of DataLoaders that may have made the current batch.

    Args:
        samples: of the current batch: loaders of smaller batches did not make it.
    """
    kinds = _list_subclasses(LoaderIterator)
    # An object refers to its class: the garbage collector searches for that in C.
    found = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    sized = [one for one in found if one._num_yielded and hasattr(one._index_sampler, "batch_size")]
    return [one for one in sized if one._index_sampler.batch_size >= samples]


def list_unsharded_loaders(iterators: Sequence[Any]) -> list[list[Any]]:
    """Return the DataLoaders in use whose dataset is not split over ranks.

    Args:
        iterators: of the loaders.

    Returns:
        For each loader [name of the sampler, length and hashes of two samples of the dataset].
    """
    entries = [identify_unsharded_data(one._index_sampler, one._dataset) for one in iterators]
    return [entry for entry in entries if entry is not None]


def list_distributed_samplers(iterators: Sequence[Any]) -> list[Any]:
    """Return the samplers that deal a dataset to ranks, as torch's DistributedSampler does."""
    samplers = [getattr(one._index_sampler, "sampler", None) for one in iterators]
    return [one for one in samplers if isinstance(one, DistributedSampler)]


def describe_sampler(sampler: Any) -> dict[str, Any]:
    """Return the settings of a DistributedSampler, as ranks compare them."""
    told = {"seed": sampler.seed, "epoch": sampler.epoch, "shuffle": sampler.shuffle}
    told |= {"drop_last": sampler.drop_last, "samples": len(sampler.dataset)}
    return {**told, "num_replicas": sampler.num_replicas, "rank": sampler.rank}


class SamplerEpochs:
    """Count of samples since a sampler's last `set_epoch`.

    Args:
        sampler: shuffles the dataset by its number of the epoch.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = weakref.ref(sampler)
        self._epoch, self._samples = sampler.epoch, 0

    def repeats(self, samples: int) -> bool:
        """Return whether a batch comes after the epoch's last sample, in the same order again.

        Args:
            samples: of the batch.
        """
        sampler = self._sampler()
        if sampler is None:
            return False
        if sampler.epoch != self._epoch:
            self._epoch, self._samples = sampler.epoch, 0
        self._samples += samples
        return bool(self._samples > len(sampler))


Field = tuple[str, str, float]
"""Digest of a part of a sample · its text if it is one whole number, else "" · its bits."""


def list_rows(iterators: Sequence[Any]) -> list[dict[str, list[Field]]]:
    """Return the parts of some samples of each loader's dataset, to compare over ranks.

    Args:
        iterators: of the loaders.

    Returns:
        For each dataset: index of the sample → its parts. Samples are read within `LOOK_S`, with
        equal seeds on all ranks.
    """
    found = []
    for one in iterators:
        until_s, rows = time.monotonic() + LOOK_S, dict[str, list[Field]]()
        try:
            count = len(one._dataset) if is_indexed(one._dataset) else 0
            for index in range(0, count, max(1, count // LOOKS)):
                with seeded_rng("rows", index):
                    sample = one._dataset[index]
                rows[str(index)] = [_describe_field(leaf) for leaf in pytree.tree_leaves(sample)]
                if time.monotonic() > until_s:
                    break
        except Exception:  # training meets the same error and reports it
            rows = {}
        found.append(rows)
    return found


def _describe_field(leaf: Any) -> Field:
    numbers = np.asarray(leaf) if isinstance(leaf, torch.Tensor | np.ndarray | int) else None
    if numbers is not None and numbers.size == 1 and numbers.dtype.kind in "iu":
        return digest_of(leaf), str(numbers.item()), 0.0
    return digest_of(leaf), "", count_information_bits(leaf)


def find_other_labels(
    first: Mapping[str, Sequence[Field]], other: Mapping[str, Sequence[Field]]
) -> tuple[str, str, str] | None:
    """Return (index, label, other label) of a sample that two ranks label otherwise.

    Every other part of all samples is equal, with enough information to be the same dataset.

    Args:
        first, other: samples of two ranks, of `list_rows`.
    """
    found, bits = None, 0.0
    for index in (one for one in first if one in other):
        if len(first[index]) != len(other[index]):
            return None
        for (one, label, size), (two, other_label, _) in zip(
            first[index], other[index], strict=True
        ):
            if one == two:
                bits += size
            elif label and other_label:
                found = found or (index, label, other_label)
            else:
                return None  # each rank has data of its own
    return found if bits >= CHANCE_BITS else None


def identify_unsharded_data(batches: Any, dataset: Any) -> list[Any] | None:
    """Return an identity of a loader's data, to compare over ranks; None if it may be split.

    Args:
        batches: its batch sampler.
        dataset: its dataset.

    Returns:
        [name of the sampler, length, hashes of samples, …], or None.
    """
    sampler = batches.sampler if type(batches) is BatchSampler else None
    if type(sampler) not in (RandomSampler, SequentialSampler, SubsetRandomSampler):
        return None
    chosen = list(getattr(sampler, "indices", []))
    entry = dataset_identity(dataset)
    some = [len(chosen), digest_of(list(map(int, chosen[:64] + chosen[-64:])))]
    return None if entry is None else [type(sampler).__name__, *entry, *some]
