"""Batches of classes of their own: graphs, scenes, tensors that all samples share.

    class Scenes:
        def __len__(self): return len(self.images)
        def __getitem__(self, rows): return Scenes(self.images[rows], self.boxes[rows])

`len(batch)` is its number of samples, and `batch[a:b]` those from a to b − 1: an object of the same
class, or (inputs, targets), or a dict. A batch of graphs of PyTorch Geometric returns a list of
graphs there, which its `from_data_list` joins again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, ShoalError
from shoal.trainer._torch import pytree
from shoal.trainer.batches.batch_values import NEAREST, says_samples

DEPTH = 3
"""Objects inside of objects whose tensors are found."""


def cut_object(batch: Any, start: int, stop: int) -> Any:
    """Return the samples start … stop − 1 of a batch of a class of its own.

    Raises:
        ConfigError: its class does not cut it.
    """
    name, join = type(batch).__name__, _find_joining(batch)
    if join is not None and (start, stop) == (0, len(batch)):
        return batch
    try:
        part = batch[start:stop]
        if join is not None and type(part) is list:
            part = join(part)
    except ShoalError:
        raise
    except Exception as error:
        raise ConfigError(
            f"batch: {name}[{start}:{stop}] raised {type(error).__name__}: {error}; {NEAREST}"
        ) from error
    if says_samples(part) and len(part) != stop - start:
        raise ConfigError(
            f"batch: {name}[{start}:{stop}] has {len(part)} samples by len(); {NEAREST}"
        )
    return part


def _find_joining(batch: Any) -> Callable[[list[Any]], Any] | None:
    """Return the function that joins graphs to a batch of PyTorch Geometric; None for others."""
    for kind in type(batch).__mro__:
        if "from_data_list" in vars(kind):
            found: Callable[[list[Any]], Any] = kind.from_data_list  # type: ignore[attr-defined]
            return found
    return None


def map_tensors(value: Any, function: Callable[[Any], Any], depth: int = DEPTH) -> Any:
    """Return a value with a function applied to its tensors, those in objects included.

    Args:
        value: nested tuples, lists, dicts and objects; the user's own objects are copied.
        function: of a tensor.
        depth: objects inside of objects that are opened.
    """

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if isinstance(leaf, Mapping):
            return {key: map_tensors(one, function, depth) for key, one in leaf.items()}
        return _map_object(leaf, function, depth) if depth and is_opened(leaf) else leaf

    return pytree.tree_map(map_leaf, value)


def is_opened(value: Any) -> bool:
    """Return whether a value is an object of the user's that holds tensors in its attributes."""
    if isinstance(value, type | nn.Module):
        return False
    return hasattr(value, "__dict__") and bool(list_tensors(value))


def _map_object(value: Any, function: Callable[[Any], Any], depth: int) -> Any:
    copied = copy.copy(value)
    if hasattr(type(value), "apply"):  # of PyTorch Geometric: on the tensors of all its stores
        return copied.apply(function)
    for name, one in list(vars(copied).items()):
        vars(copied)[name] = map_tensors(one, function, depth - 1)
    return copied


def open_objects(value: Any) -> Any:
    """Return a value with the name of its class and its tensors in place of each object."""
    plain = (torch.Tensor, str, bytes, int, float, complex, type(None))

    def open_leaf(leaf: Any) -> Any:
        return leaf if isinstance(leaf, plain) else [type(leaf).__name__, *list_tensors(leaf)]

    return pytree.tree_map(open_leaf, value)


def list_tensors(value: Any, depth: int = DEPTH) -> list[torch.Tensor]:
    """Return the tensors of a value, those in the attributes of objects included.

    Args:
        value: nested tuples, lists, dicts and objects.
        depth: objects inside of objects that are opened.
    """
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):
            found += list_tensors(dict(leaf), depth)
        elif hasattr(leaf, "__dict__") and depth and not isinstance(leaf, type | nn.Module):
            found += list_tensors(dict(vars(leaf)), depth - 1)
    return found
