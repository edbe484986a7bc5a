"""Datasets of samples other than tokens: scikit-learn's digits, and parts of a dataset.

The held-out part never depends on train.seed, so runs with different seeds validate on the same
samples.
"""

from __future__ import annotations

import gzip
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from shoal.data.files.token_files import cross_entropy, pad_counts
from shoal.data.loading.sample_order import permute
from shoal.data.loading.sample_seeds import draws_nothing

SPLIT_SEED = 0
DIGITS_FILE = "datasets/data/digits.csv.gz"
"""Place of the digits in scikit-learn's folder: lines of 64 pixels, 0 … 16, and the class."""


class DeterministicTensors(TensorDataset):
    """Tensors as samples, with a marker that reading them draws nothing at random."""

    draws_nothing = True

    def read_joined(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return some samples joined, as torch's default_collate joins them one by one."""
        rows = torch.as_tensor(indices)
        return [column.index_select(0, rows) for column in self.tensors]


@dataclass(frozen=True)
class DigitsDataset:
    """Both parts of the digits; samples are (image [1, 8, 8] float32 in 0 … 1, class int64)."""

    train: DeterministicTensors
    validation: DeterministicTensors | None
    images: int
    class_entropy: float


def open_digits(share: float) -> DigitsDataset:
    """Open 1797 handwritten digits (UCI, Alpaydin & Kaynak 1998), `share` of them held out.

    `class_entropy`: nats per target of guessing by the classes' frequencies, near ln 10. Raises an
    ImportError without scikit-learn; check_data_path reports that earlier.
    """
    images, classes = _read_digits()
    inputs = torch.from_numpy((images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8))
    targets = torch.from_numpy(classes.astype(np.int64))
    shuffled = torch.from_numpy(permute(np.arange(len(targets)), len(targets), SPLIT_SEED, 0))
    held = max(1, round(share * len(targets))) if share else 0
    last, first = shuffled[:held], shuffled[held:]
    counts = [
        pad_counts(np.bincount(targets[i].numpy()), 10) for i in (first, last if held else first)
    ]
    return DigitsDataset(
        train=DeterministicTensors(inputs[first], targets[first]),
        validation=DeterministicTensors(inputs[last], targets[last]) if held else None,
        images=len(targets),
        class_entropy=cross_entropy(counts[0], counts[1]),
    )


def _read_digits() -> tuple[Any, Any]:
    """Return images [1797, 64] float64 and classes [1797] int64, as scikit-learn returns them.

    Its import takes a second, so its file is read without it.
    """
    found = importlib.util.find_spec("sklearn") if "sklearn.datasets" not in sys.modules else None
    path = Path(found.origin).parent / DIGITS_FILE if found and found.origin else Path()
    if not path.is_file():  # another version may have another place for it
        from sklearn.datasets import load_digits

        images, classes = load_digits(return_X_y=True)
        return images, classes
    with gzip.open(path, "rt", encoding="utf-8") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


class LeadingSamples(IterableDataset[Any]):
    """IterableDataset of the first `samples` samples: `LeadingSamples(data, samples)`.

    Every iteration restarts `data`; nothing is copied.
    """

    def __init__(self, data: Any, samples: int) -> None:
        self.data = data
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.data), self.samples)


class EvenSubset(Dataset[Any]):
    """The training or held-out samples of a dataset, the held-out ones spread evenly over it.

    A map-style dataset that reads `dataset` on demand; `whole_index(i)` is the index in `dataset`.
    Formula of n samples, held out: ⌊j·n/h⌋ for j < h; in training: ⌈(i+1)·n/(n−h)⌉ − 1, i < n−h.
             Together that is every index once (two complementary Beatty sequences), without a list;
             data sorted by class gives up a like share of every class.

    Args:
        dataset: the whole dataset.
        held: number of held-out samples, 1 ≤ held < n.
        held_out: True for the held-out part.

    Raises:
        IndexError: the index is beyond the part.
    """

    def __init__(self, dataset: Any, held: int, held_out: bool) -> None:
        self.dataset = dataset
        self.samples = len(dataset)
        self.held = held
        self.held_out = held_out
        self.draws_nothing = draws_nothing(dataset)

    def __len__(self) -> int:
        return self.held if self.held_out else self.samples - self.held

    def whole_index(self, index: int) -> int:
        """Return the index in the whole dataset of sample `index`; may raise IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if self.held_out:
            return index * self.samples // self.held
        return -(-(index + 1) * self.samples // (self.samples - self.held)) - 1

    def __getitem__(self, index: int) -> Any:
        """Return sample `index` of this part; raises IndexError and the dataset's own errors."""
        return self.dataset[self.whole_index(index)]

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the names of the sources of a mixture; () for other datasets."""
        return tuple(getattr(self.dataset, "source_names", ()))

    @property
    def source_metrics(self) -> tuple[str, ...]:
        """Return the metrics that a validation returns for each source, as the whole dataset."""
        return tuple(getattr(self.dataset, "source_metrics", ()))

    def source_of(self, whole_index: int) -> str:
        """Return the name of the source of a sample of a mixture, by its `whole_index`."""
        return self.dataset.source_of(whole_index)
