"""Encoding of each opened dataset of tokens: who cut the text, and which ids may come.

A dataset of tokens holds numbers alone. `open_source` records here which tokenizer made them, so
that a run can compare them with its model. The record ends with the dataset.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Subset


@dataclass(frozen=True)
class Encoding:
    """Origin of the tokens of a dataset.

    Attributes:
        source: value of `data.source`.
        spec: value of `data.tokenizer`; "" if the data was tokens already.
        vocabulary: ids are below it.
        tokenizer: a `tokenizers.Tokenizer`; None if the data was tokens already.
    """

    source: str
    spec: str
    vocabulary: int
    tokenizer: Any


_encodings: weakref.WeakKeyDictionary[Any, Encoding] = weakref.WeakKeyDictionary()


def record_encoding(dataset: Any, encoding: Encoding) -> None:
    """Record how a dataset was encoded."""
    _encodings[dataset] = encoding


def find_encoding(dataset: Any) -> Encoding | None:
    """Return the encoding of a dataset, of one inside a Subset or a DataLoader; None if unknown."""
    while isinstance(dataset, Subset | DataLoader):
        dataset = dataset.dataset
    try:
        return _encodings.get(dataset)
    except TypeError:  # no weak references, as a list
        return None
