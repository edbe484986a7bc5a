"""Count the samples of a batch, and split it into micro-batches, for any nesting of its values.

    tensor, array              its dim 0 is the samples'
    list of plain values       one value per sample, if there are as many
    list of tensors, dicts     one item per sample, or columns as torch's collate function makes
    an object of a class       len(batch) samples, which batch[a:b] cuts
    anything else              whole in every part, as a tensor without dims

A tensor that all samples share may have as many rows as there are samples. `known` has its path.

Few batches have such lists or objects; `sample_lists.py` and `batch_objects.py` read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_columns import BatchColumns, list_paths
from shoal.trainer.batches.batch_values import (
    NEAREST,
    SHARED,
    Readings,
    as_dict,
    is_tensor,
    list_inside,
    needs_reading,
    says_samples,
    to_tensor,
)


def read_columns(batch: Any, known: Readings | None = None) -> BatchColumns:
    """Return the columns of a batch.

    Args:
        batch: as a step takes it.
        known: readings of earlier batches, to which those of this batch are added.

    Raises:
        ConfigError: the batch holds no samples that can be counted, or unequal numbers of them.
    """
    batch = as_dict(batch)
    leaves, structure = pytree.tree_flatten(batch, is_leaf=list_inside(batch))
    if any(map(needs_reading, leaves)):
        from shoal.trainer.batches.sample_lists import read_lists

        return read_lists(batch, {} if known is None else known)
    leaves = [to_tensor(leaf) for leaf in leaves]
    rows = [leaf.shape[0] if is_tensor(leaf) else None for leaf in leaves]
    shared = _find_shared(batch, leaves, rows)
    if known and SHARED in known.values():
        paths = list_paths(structure, len(leaves))
        shared = [one or known.get(path) == SHARED for one, path in zip(shared, paths, strict=True)]
    sizes = [None if one else size for size, one in zip(rows, shared, strict=True)]
    samples = next((size for size in sizes if size is not None), None)
    if samples is None and any(isinstance(leaf, list) and not leaf for leaf in leaves):
        samples = 0
    if samples is None:
        raise ConfigError(_no_samples_line(leaves))
    for place, size in enumerate(sizes):
        if size is not None and size != samples:
            raise ConfigError(_unequal_line(batch, samples, place, leaves[place]))
    cuts = [
        size is not None or (isinstance(leaf, list) and len(leaf) == samples)
        for leaf, size in zip(leaves, sizes, strict=True)
    ]
    return BatchColumns(samples, leaves, structure, cuts)


def _find_shared(batch: Any, leaves: list[Any], rows: list[int | None]) -> list[bool]:
    """Return which tensors are of all samples: a dim 0 of 1 beside others, as torch broadcasts it.

    A tensor of one dim, and the targets of a pair, are not: a loss would weigh them by the number
    of micro-batches.
    """
    inputs = len(leaves)
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs = len(pytree.tree_leaves(batch[0], is_leaf=lambda value: isinstance(value, list)))
    small = [
        place < inputs and size == 1 and leaf.ndim > 1
        for place, (leaf, size) in enumerate(zip(leaves, rows, strict=True))
    ]
    if not any(small):
        return small
    others = {size for size, one in zip(rows, small, strict=True) if size is not None and not one}
    return small if others - {1} else [False] * len(leaves)


def batch_length(batch: Any, known: Readings | None = None) -> int:
    """Return the number of samples of a batch; if values disagree, that of the first tensor.

    Args:
        batch: as a step takes it, or its inputs or targets.
        known: as in `read_columns`.

    Raises:
        ConfigError: the batch holds nothing that counts samples.
    """
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    plain = not known or SHARED not in known.values()
    if plain and isinstance(first, torch.Tensor) and first.ndim > 0 and first.shape[0] != 1:
        return first.shape[0]
    try:
        return read_columns(batch, known).samples
    except ConfigError:
        leaves = pytree.tree_leaves(as_dict(batch))
        if found := [int(leaf.shape[0]) for leaf in leaves if is_tensor(leaf)]:
            return found[0]
        raise


def has_plain_tensors(batch: Any) -> bool:
    """Return whether all tensors of a batch are dense, and none has a graph behind it."""
    return all(
        one.layout == torch.strided and not one.is_nested and one.grad_fn is None
        for one in pytree.tree_leaves(batch)
        if isinstance(one, torch.Tensor)
    )


def target_length(targets: Any) -> int:
    """Return the number of samples of targets alone, which may be one list of samples.

    Raises:
        ConfigError: as `batch_length`.
    """
    if isinstance(targets, torch.Tensor) and targets.ndim:
        return targets.shape[0]
    return batch_length((targets,) if isinstance(targets, list) else targets)


def split_into_micro_batches(
    batch: Any, micro_batch: int, known: Readings | None = None
) -> Iterator[Any]:
    """Split a batch into parts of `micro_batch` samples.

    Arrays of numbers become tensors. What is not of the samples goes whole into every part.

    Args:
        batch: as a step takes it.
        micro_batch: samples of a part; 0: all.
        known: as in `read_columns`.

    Raises:
        ConfigError: values disagree about the number of samples.
    """
    columns = read_columns(batch, known)
    size = max(1, micro_batch or columns.samples)
    for start in range(0, columns.samples, size):
        yield columns.cut(start, min(start + size, columns.samples))


def has_item_per_sample(value: Any, samples: int) -> bool:
    """Return whether a value has one item per sample: a list, or an object cut by slices.

    Args:
        value: a part of targets.
        samples: number of samples.
    """
    if not isinstance(value, list):
        return says_samples(value) and len(value) == samples
    if len(value) != samples or not needs_reading(value):
        return len(value) == samples
    from shoal.trainer.batches.sample_lists import is_sample_list

    return is_sample_list(value, samples)


def _no_samples_line(leaves: list[Any]) -> str:
    flat = [one for leaf in leaves for one in (leaf if isinstance(leaf, list) else [leaf])]
    held = sorted({type(one).__name__ for one in flat})
    return (
        f"batch: holds no tensor whose dim 0 counts samples, but {', '.join(held) or 'nothing'}; "
        f"try: samples of tensors or numbers, or a collate function that makes them of these"
    )


def _unequal_line(batch: Any, samples: int, place: int, leaf: Any) -> str:
    paths = pytree.tree_flatten_with_path(batch, is_leaf=list_inside(batch))[0]
    return (
        f"batch: tensors of {samples} and {leaf.shape[0]} samples along dim 0 (shape "
        f"{list(leaf.shape)}) in batch{pytree.keystr(paths[place][0])}; every tensor of a batch "
        f"needs the same number; {NEAREST}"
    )
