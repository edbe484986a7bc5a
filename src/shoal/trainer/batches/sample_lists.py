"""Read lists of tensors and dicts in a batch: a list of samples, or of columns?

    [image [3, 40, 50], image [3, 32, 64], …]      as many items as samples: one per sample
    [crop [8, 3, 96, 96], crop [8, 3, 32, 32]]     dim 0 of each is the samples': columns
    [{"boxes": [5, 4]}, {"boxes": [2, 4]}, …]      targets of a detector: one dict per sample

The number of samples is that of the tensors outside of lists, or of an object that says its own.
Without these it is the one that fits all lists. A list of N tensors of N rows each fits both ways,
as three images of three channels. Then another list of the batch decides, or an earlier batch in
which the same list fitted one way, on any rank. A list in doubt is not cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.base.errors import ConfigError
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_columns import BatchColumns, list_paths
from shoal.trainer.batches.batch_values import (
    COLUMNS,
    NEAREST,
    SAMPLES,
    SHARED,
    Readings,
    is_tensor,
    list_inside,
    says_samples,
    to_tensor,
)


def read_lists(batch: Any, known: Readings) -> BatchColumns:
    """Return the columns of a batch with lists of tensors or objects of classes of their own.

    Args:
        batch: as a step takes it, no mapping but a dict.
        known: readings of earlier batches by path, to which those without doubt are added.

    Raises:
        ConfigError: no number of samples fits all values.
    """
    found = pytree.tree_flatten_with_path(batch, is_leaf=list_inside(batch))[0]
    values = {pytree.keystr(path): value for path, value in found}
    lists = {path: one for path, one in values.items() if isinstance(one, list) and one}
    rich = {path: one for path, one in lists.items() if any(map(_is_rich, one))}
    shared = {path for path, told in known.items() if told == SHARED}
    values = {path: one for path, one in values.items() if path not in shared}
    own = {path: _own_items(path, items, shared) for path, items in rich.items()}
    mixed = {path: items for path, items in own.items() if items}
    samples = _count_samples(values, mixed, known)
    readings, doubts = dict.fromkeys(shared, SHARED), []
    for path, items in mixed.items():
        fits = _list_fits(items, samples)
        if len(items) < len(rich[path]):  # a list with a tensor of all samples holds columns
            fits = [one for one in fits if one == COLUMNS]
        if not fits:
            raise ConfigError(
                f"batch: a list of {len(items)} in batch{path} beside {samples} samples, and dim 0 "
                f"of its tensors counts no samples either; {NEAREST}"
            )
        if len(fits) == 1:
            readings[path] = fits[0]
        elif _has_dicts(items):
            readings[path] = SAMPLES
        else:
            doubts.append(path)
    known |= readings
    cut_error = ""
    for path in doubts:
        told = known.get(path) or (SAMPLES if SAMPLES in readings.values() else "")
        readings[path] = told or COLUMNS
        if not told and samples > 2:
            cut_error = (
                f"batch: a list of {samples} tensors of {samples} rows each in batch{path} may be "
                f"{samples} samples, or {samples} columns of all samples; try: a tuple for "
                f"columns; for samples {NEAREST.removeprefix('try: ')}"
            )
    return _flatten_batch(batch, samples, readings, cut_error)


def _flatten_batch(batch: Any, samples: int, readings: Readings, cut_error: str) -> BatchColumns:
    """Return the batch's values as columns; `readings`: which lists hold samples, which columns."""
    whole = {pytree.keystr(path): value for path, value
             in pytree.tree_flatten_with_path(batch, is_leaf=list_inside(batch))[0]}  # fmt: skip
    ends = {id(whole[path]) for path, told in readings.items() if told == SAMPLES}
    inside = list_inside(batch)
    leaves, structure = pytree.tree_flatten(
        batch,
        is_leaf=lambda value: (
            id(value) in ends or (inside(value) and not any(map(_is_rich, value)))
        ),
    )
    leaves = [to_tensor(leaf) for leaf in leaves]
    cuts = [
        _length(leaf) == samples and readings.get(path) != SHARED
        for leaf, path in zip(leaves, list_paths(structure, len(leaves)), strict=True)
    ]
    return BatchColumns(samples, leaves, structure, cuts, cut_error)


def _own_items(path: str, items: list[Any], shared: set[str]) -> list[Any]:
    """Return the items of a list that not all samples share."""
    return [one for place, one in enumerate(items) if f"{path}[{place}]" not in shared]


def _length(value: Any) -> int:
    """Return the number of samples that a value may hold; −1 for none."""
    if is_tensor(value):
        return int(value.shape[0])
    return len(value) if isinstance(value, list) or says_samples(value) else -1


def _count_samples(values: dict[str, Any], rich: dict[str, list[Any]], known: Readings) -> int:
    """Return the number of samples that fits the values of a batch.

    Raises:
        ConfigError: none does.
    """
    for kind in (says_samples, is_tensor):
        sizes = {path: _length(one) for path, one in values.items() if kind(one)}
        if not sizes:
            continue
        samples = next(iter(sizes.values()))
        tensors = {path: _length(one) for path, one in values.items() if is_tensor(one)}
        for path, size in {**sizes, **tensors}.items():
            if size != samples:
                raise ConfigError(
                    f"batch: {samples} samples, and {size} in batch{path}; every value of a batch "
                    f"needs the same number; {NEAREST}"
                )
        return samples
    fits = [{len(items), *_rows(items)} for items in rich.values()]
    possible = set.intersection(*fits)
    if not possible:
        lengths = ", ".join(f"{len(items)} in batch{path}" for path, items in rich.items())
        raise ConfigError(f"batch: lists of {lengths} have no number of samples in common; "
                          f"{NEAREST}")  # fmt: skip
    for path, items in rich.items():
        if (_has_dicts(items) or known.get(path) == SAMPLES) and len(items) in possible:
            return len(items)
    columns = [one for one in possible if all(one in _rows(items) for items in rich.values())]
    return columns[0] if columns else max(possible)


def is_sample_list(items: list[Any], samples: int) -> bool:
    """Return whether a list of tensors or dicts has one item per sample, and no columns.

    Args:
        items: the list.
        samples: number of samples.
    """
    fits = _list_fits(items, samples)
    return SAMPLES in fits and (len(fits) == 1 or _has_dicts(items))


def _list_fits(items: list[Any], samples: int) -> list[str]:
    """Return how a list can be read if there are so many samples."""
    fits = [SAMPLES] if len(items) == samples else []
    return [*fits, COLUMNS] if samples in _rows(items) else fits


def _rows(items: list[Any]) -> set[int]:
    """Return dim 0 of the tensors inside a list, if all have one in common; else nothing."""
    sizes = {one.shape[0] for one in pytree.tree_leaves(items) if is_tensor(one)}
    return sizes if len(sizes) == 1 else set()


def _has_dicts(items: list[Any]) -> bool:
    return any(isinstance(one, Mapping) for one in items)


def _is_rich(value: Any) -> bool:
    return is_tensor(value) or isinstance(value, Mapping | list | tuple)
