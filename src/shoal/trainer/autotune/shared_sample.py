"""Samples with tensors that all samples share, for models that fail on the first rows of all.

x [8, 6], table [8, 6]         the first 3 rows of x beside the whole table
nodes [8, 6], links [8, 8]     all nodes and all links: neighbours are needed
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_split import (
    batch_length,
    read_columns,
    split_into_micro_batches,
)
from shoal.trainer.batches.batch_values import SHARED, Readings, is_tensor, says_samples
from shoal.trainer.step.call_contract import split_batch

SHARED_MOST = 2
"""Number of tensors that all samples share, at most."""


def list_wider_batches(given: Any, samples: int) -> Iterator[tuple[Any, int]]:
    """Yield batches with one or two tensors of the inputs whole, then the whole batch.

    Args:
        given: the whole batch.
        samples: number of samples of the others.

    Yields:
        (batch, number of its samples).
    """
    for known in _list_readings(given):
        yield next(split_into_micro_batches(given, samples, known)), samples
    yield given, batch_length(given)


def _list_readings(batch: Any) -> Iterator[Readings]:
    """Yield readings in which one or two tensors of the inputs are shared by all samples.

    Targets are left out: the pass does not read them.

    Args:
        batch: the whole batch; one that says its samples by itself has no such tensors.

    Yields:
        Paths of the tensors.
    """
    if says_samples(batch):
        return
    columns, inputs = read_columns(batch), split_batch(batch)[0]
    held = {id(leaf) for leaf in pytree.tree_leaves(inputs)}
    paths = [
        path
        for path, leaf, cuts in zip(columns.paths, columns.leaves, columns.is_cut, strict=True)
        if cuts and is_tensor(leaf) and id(leaf) in held
    ]
    for size in range(1, min(len(paths), SHARED_MOST + 1)):
        for shared in itertools.combinations(paths, size):
            yield dict.fromkeys(shared, SHARED)
