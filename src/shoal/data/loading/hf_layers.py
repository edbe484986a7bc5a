"""Layers of a streaming dataset of the library `datasets`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def is_streaming(dataset: Any) -> bool:
    """Return whether a dataset is an `IterableDataset` of `datasets`, without importing that."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(dataset, library.IterableDataset)


def iter_layers(dataset: Any) -> Iterator[Any]:
    """Yield the wrapped layers of a streaming dataset, the outermost first."""
    waiting = [dataset._ex_iterable]
    while waiting:
        layer = waiting.pop()
        yield layer
        below = getattr(layer, "ex_iterable", None)
        waiting += [below] if below is not None else getattr(layer, "ex_iterables", [])


def shuffle_buffer_samples(dataset: Any) -> int:
    """Return the samples of the dataset's largest shuffle buffer; 0 if it has none."""
    return max((layer_buffer_samples(layer) for layer in iter_layers(dataset)), default=0)


def layer_buffer_samples(layer: Any) -> int:
    """Return the samples of a shuffle-buffer layer; 0 for other layers."""
    name = type(layer).__name__
    return int(layer.buffer_size) if name == "BufferShuffledExamplesIterable" else 0
