"""A batch as values that are cut along the samples, and values that are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.base.errors import ConfigError
from shoal.trainer._torch import pytree


@dataclass(frozen=True)
class BatchColumns:
    """A batch as values that are cut along the samples, and values that are not.

    Attributes:
        samples: number of samples.
        leaves, structure: of the batch; a list of samples is one leaf.
        is_cut: for each leaf, whether it is cut.
        cut_error: why the batch must not be cut; "": it may be.
    """

    samples: int
    leaves: list[Any]
    structure: Any
    is_cut: list[bool]
    cut_error: str = ""

    @property
    def paths(self) -> list[str]:
        """Return the path of each leaf in the batch, as "[0]['table']"."""
        return list_paths(self.structure, len(self.leaves))

    def cut(self, start: int, stop: int) -> Any:
        """Return the samples start … stop − 1 as a batch."""
        if self.cut_error and stop - start < self.samples:
            raise ConfigError(self.cut_error)
        parts = [
            _slice(leaf, start, stop) if cuts else leaf
            for leaf, cuts in zip(self.leaves, self.is_cut, strict=True)
        ]
        return pytree.tree_unflatten(parts, self.structure)

    def join(self, parts: list[Any]) -> Any:
        """Return one batch of all samples of some parts, each cut as this batch.

        Args:
            parts: batches of tensors, arrays and lists.
        """
        columns = zip(*(self.structure.flatten_up_to(part) for part in parts), strict=True)
        joined = [
            _join(column) if cuts else column[0]
            for column, cuts in zip(columns, self.is_cut, strict=True)
        ]
        return pytree.tree_unflatten(joined, self.structure)


def list_paths(structure: Any, number: int) -> list[str]:
    """Return the path of each leaf of a batch.

    Args:
        structure: of the batch.
        number: of its leaves.
    """
    places = pytree.tree_unflatten(list(range(number)), structure)
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(places)[0]]


def _slice(leaf: Any, start: int, stop: int) -> Any:
    if isinstance(leaf, torch.Tensor | np.ndarray | list):
        return leaf[start:stop]
    from shoal.trainer.batches.batch_objects import cut_object

    return cut_object(leaf, start, stop)


def _join(column: tuple[Any, ...]) -> Any:
    if isinstance(column[0], list):
        return [one for items in column for one in items]
    return torch.cat([torch.as_tensor(one) for one in column])
