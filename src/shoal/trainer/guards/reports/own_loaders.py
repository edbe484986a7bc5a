"""Detect DataLoaders of the user's own that show every rank the whole dataset."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from shoal.data.loading.dataset_kind import dataset_identity, digest_of
from shoal.trainer._torch import LoaderIterator, pytree


def count_information_bits(batch: Any) -> float:
    """Return an upper bound of a batch's information in bits: numbers × log2 of distinct values."""
    bits = 0.0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            some = leaf.detach().reshape(-1)[:4096]
            bits += some.numel() * math.log2(max(1, some.unique().numel()))
    return bits


def _list_subclasses(kind: type) -> list[type]:
    """Return a class and all its subclasses."""
    children: list[type] = kind.__subclasses__()
    return [kind, *(found for one in children for found in _list_subclasses(one))]


def list_unsharded_loaders(samples: int) -> list[list[Any]]:
    """Return the DataLoaders in use whose dataset is not split over ranks.

    Args:
        samples: of the current batch: loaders of smaller batches did not make it.

    Returns:
        For each loader [name of the sampler, length and hashes of two samples of the dataset].
    """
    found = []
    kinds = {id(kind) for kind in _list_subclasses(LoaderIterator)}
    for one in [each for each in gc.get_objects() if id(type(each)) in kinds]:
        if not one._num_yielded:
            continue
        entry = identify_unsharded_data(one._index_sampler, one._dataset)
        if entry is not None and one._index_sampler.batch_size >= samples:
            found.append(entry)
    return found


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
