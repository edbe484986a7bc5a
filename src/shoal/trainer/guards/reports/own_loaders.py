"""Tell whether a DataLoader of a user's own shows every rank the whole dataset."""

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

from shoal.data.loading.dataset_kind import digest_of, identity_of
from shoal.trainer._torch import LoaderIterator, pytree


def information(batch: Any) -> float:
    """Bits that the values of a batch could tell apart, at most: numbers × log2 of unlike ones."""
    bits = 0.0
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            leaf = torch.as_tensor(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            some = leaf.detach().reshape(-1)[:4096]
            bits += some.numel() * math.log2(max(1, some.unique().numel()))
    return bits


def _with_subclasses(kind: type) -> list[type]:
    """Return a class and all that inherit from it."""
    children: list[type] = kind.__subclasses__()
    return [kind, *(found for one in children for found in _with_subclasses(one))]


def whole_loaders(samples: int) -> list[list[Any]]:
    """DataLoaders that are being iterated, each over a dataset it does not deal to ranks.

    Args:
        samples: of the batch in hand: those of other sizes did not make it.

    Returns:
        [name of the sampler, length and hashes of two samples of the dataset], each.
    """
    found = []
    kinds = {id(kind) for kind in _with_subclasses(LoaderIterator)}
    for one in [each for each in gc.get_objects() if id(type(each)) in kinds]:
        if not one._num_yielded:
            continue
        entry = whole_data(one._index_sampler, one._dataset)
        if entry is not None and one._index_sampler.batch_size >= samples:
            found.append(entry)
    return found


def whole_data(batches: Any, dataset: Any) -> list[Any] | None:
    """Identify the data of a loader that knows nothing of ranks, to compare it over them.

    Args:
        batches: its batch sampler.

    Returns:
        [name of the sampler, length, hashes of samples, …]; None where the sampler may deal.
    """
    sampler = batches.sampler if type(batches) is BatchSampler else None
    if type(sampler) not in (RandomSampler, SequentialSampler, SubsetRandomSampler):
        return None
    chosen = list(getattr(sampler, "indices", []))
    entry = identity_of(dataset)
    some = [len(chosen), digest_of(list(map(int, chosen[:64] + chosen[-64:])))]
    return None if entry is None else [type(sampler).__name__, *entry, *some]
