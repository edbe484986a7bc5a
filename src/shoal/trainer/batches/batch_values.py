"""Kinds of values in a batch: tensors, lists, objects that say their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shoal.trainer._torch import pytree

NEAREST = (
    "try: a batch of a class with __len__, its number of samples, and __getitem__(slice), which "
    "returns those samples and what all of them share"
)

SAMPLES, COLUMNS, SHARED = "samples", "columns", "shared"
Readings = dict[str, str]
"""Path of a list in a batch → SAMPLES or COLUMNS, as an earlier batch showed without doubt; path of
a tensor → SHARED, if all samples share it whatever its dim 0 is, or SAMPLES, if that is proven."""


def as_dict(batch: Any) -> Any:
    """Return a dict for another mapping: pytree cannot look into transformers' BatchEncoding."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def to_tensor(value: Any) -> Any:
    """Return an array of numbers as a tensor, which shares its memory where it can; else itself."""
    if type(value) is not np.ndarray or not isinstance(
        getattr(torch, value.dtype.name, None), torch.dtype
    ):
        return value
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))


def list_inside(batch: Any) -> Callable[[Any], bool]:
    """Return a function that returns whether a value is a list, and not the batch itself."""
    return lambda value: isinstance(value, list) and value is not batch


def is_tensor(leaf: Any) -> bool:
    """Return whether a value is a tensor or an array with dims."""
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


NO_SAMPLES = (torch.Tensor, list, tuple, dict, np.ndarray, str, bytes, range, Mapping)
"""Classes of values that are cut otherwise; frequent ones first, since each batch is asked."""


def says_samples(value: Any) -> bool:
    """Return whether a value is of a class that counts samples by len() and is cut by a slice."""
    if isinstance(value, NO_SAMPLES):
        return False
    kind = type(value)
    return hasattr(kind, "__len__") and hasattr(kind, "__getitem__")


PLAIN = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None))
"""Classes of values that are no objects."""


def has_objects(batch: Any) -> bool:
    """Return whether a batch holds other values than tensors, arrays, numbers and texts."""
    if isinstance(batch, PLAIN):
        return False
    if type(batch) is tuple and set(map(type, batch)).issubset(PLAIN):
        return False  # most batches; a walk of the tree costs thirty calls
    return not all(isinstance(leaf, PLAIN) for leaf in pytree.tree_leaves(batch))


def needs_reading(leaf: Any) -> bool:
    """Return whether a value is a list of other than plain values, or of a class of its own."""
    if isinstance(leaf, list):
        return any(
            isinstance(one, torch.Tensor | np.ndarray | Mapping | list | tuple) for one in leaf
        )
    return says_samples(leaf)
