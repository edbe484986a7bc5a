"""Split one dataset over data owners, for experiments: `data.split`.

    even            every owner gets ⌊n/N⌋ or ⌈n/N⌉ samples, drawn from all
    labels:K        owner i gets the labels i·K … i·K + K − 1, modulo the number of labels; the
                    owners of a label share its samples evenly
    dirichlet:α     of each label, the owners get shares drawn from Dirichlet(α, …, α): with α = 0.1
                    most owners have a few labels, and some have no sample at all

The deal depends on `train.seed`, the samples' labels and the number of owners alone. Each sample
belongs to one owner. Held-out samples are dealt too, by the same shares of each label, so that each
owner validates on labels like those it trains on. An owner may hold none of them.

Source: Yurochkin et al. 2019 and Li et al. 2022 (NIID-Bench) for dirichlet, per label as there; no
owner is given a least number of samples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.base.errors import ConfigError
from shoal.config.owners import parse_split

Indices = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OwnerDeal:
    """Deal of a dataset to data owners.

    Attributes:
        parts: sample numbers of every owner, ascending; an owner may have none.
        labels: labels of the dataset, ascending; () if the deal does not look at them.
        shares: [labels, owners], or [1, owners] without labels: each row sums to 1.
    """

    split: str
    seed: int
    parts: list[Indices]
    labels: tuple[int, ...]
    shares: Shares

    def deal_held_out(self, dataset: Any) -> Indices:
        """Return the number of the data owner of each held-out sample, by the same shares.

        Args:
            dataset: with a length and an index. A label that training lacks is dealt evenly.

        Raises:
            ConfigError: samples without labels.
        """
        owners = self.shares.shape[1]
        generator = np.random.Generator(np.random.PCG64([self.seed, owners, HELD_OUT]))
        labels = np.zeros(len(dataset), dtype=np.int64)
        rows = {0: self.shares[0]}
        if self.labels:
            labels = _read_labels(dataset, self.split)
            rows = dict(zip(self.labels, self.shares, strict=True))
        even = np.full(owners, 1 / owners)
        found = np.empty(len(dataset), dtype=np.int64)
        for indices in _group_by_label(labels, generator):
            shares = rows.get(int(labels[indices[0]]), even)
            for owner, part in enumerate(_cut(indices, shares)):
                found[part] = owner
        return found


HELD_OUT = 1
"""Part of the seed of the held-out samples' order."""


def deal_samples(dataset: Any, owners: int, split: str, seed: int) -> OwnerDeal:
    """Deal the samples of a dataset to data owners.

    Args:
        dataset: with a length and an index; labels are read for all kinds but even.

    Raises:
        ConfigError: another form, samples without labels, or labels that no owner would get.
    """
    kind, number = parse_split(split)
    generator = np.random.Generator(np.random.PCG64([seed, owners]))
    if kind == "even":
        order = generator.permutation(len(dataset))
        dealt = [np.sort(order[owner::owners]).astype(np.int64) for owner in range(owners)]
        return OwnerDeal(split, seed, dealt, (), np.full((1, owners), 1 / owners))
    labels = _read_labels(dataset, split)
    by_label = _group_by_label(labels, generator)
    parts: list[list[Indices]] = [[] for _ in range(owners)]
    if kind == "labels":
        shares = _deal_labels(by_label, parts, int(number), split)
    else:
        shares = _deal_dirichlet(by_label, parts, number, generator)
    dealt = [
        np.sort(np.concatenate(part)) if part else np.empty(0, dtype=np.int64) for part in parts
    ]
    return OwnerDeal(split, seed, dealt, tuple(map(int, np.unique(labels))), shares)


def _cut(indices: Indices, shares: Shares) -> list[Indices]:
    """Cut samples into consecutive parts whose sizes are the shares of them, rounded."""
    cuts = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
    return np.split(indices, cuts)


def _deal_labels(
    by_label: Sequence[Indices], parts: list[list[Indices]], each: int, split: str
) -> Shares:
    """Split the samples of every label evenly over the data owners that have it; return shares."""
    labels, owners = len(by_label), len(parts)
    if each * owners < labels:
        raise ConfigError(
            f"data.split = {split}: {owners} owners with {each} of {labels} labels each leave some "
            f"out; try: data.split=labels:{-(-labels // owners)}"
        )
    holders: list[list[int]] = [[] for _ in by_label]
    for owner in range(owners):
        for label in {(owner * each + k) % labels for k in range(each)}:
            holders[label].append(owner)
    shares = np.zeros((labels, owners))
    for row, (indices, some) in enumerate(zip(by_label, holders, strict=True)):
        for place, owner in enumerate(some):
            parts[owner].append(indices[place :: len(some)])
            shares[row, owner] = 1 / len(some)
    return shares


def _deal_dirichlet(
    by_label: Sequence[Indices],
    parts: list[list[Indices]],
    alpha: float,
    generator: np.random.Generator,
) -> Shares:
    """Split the samples of every label by shares drawn from a Dirichlet distribution."""
    rows = []
    for indices in by_label:
        shares = generator.dirichlet([alpha] * len(parts))
        rows.append(shares)
        for owner, part in enumerate(_cut(indices, shares)):
            parts[owner].append(part)
    return np.stack(rows)


def _group_by_label(labels: Indices, generator: np.random.Generator) -> list[Indices]:
    """Return the shuffled sample numbers of each label, by ascending label."""
    return [
        generator.permutation(np.flatnonzero(labels == label)).astype(np.int64)
        for label in np.unique(labels)
    ]


def _read_labels(dataset: Any, split: str) -> Indices:
    """Return the label of every sample, from (inputs, label) pairs with an integer label."""
    found = np.empty(len(dataset), dtype=np.int64)
    for index in range(len(dataset)):
        sample = dataset[index]
        label: Any = sample[1] if isinstance(sample, tuple | list) and len(sample) == 2 else None
        if hasattr(label, "item") and getattr(label, "ndim", 1) == 0:
            label = label.item()
        if not isinstance(label, int):
            raise ConfigError(
                f"data.split = {split}: deals by the label of a sample, and sample {index} is no "
                f"pair of inputs and a whole number; try: data.split=even"
            )
        found[index] = label
    return found


class OwnerSubset:
    """Samples of one data owner, as a dataset; `indices` are their numbers in the full one."""

    def __init__(self, dataset: Any, indices: Indices) -> None:
        self.dataset, self.indices = dataset, indices
        self.draws_nothing = bool(getattr(dataset, "draws_nothing", False))
        if type(self) is OwnerSubset and hasattr(dataset, "read_joined"):
            self.read_joined = self._read_joined

    def __len__(self) -> int:
        """Return the number of the data owner's samples."""
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        """Return the data owner's sample `index`."""
        return self.dataset[int(self.indices[index])]

    def _read_joined(self, indices: Sequence[int]) -> Any:
        """Return some of the data owner's samples, joined by the dataset itself."""
        return self.dataset.read_joined(self.indices.take(indices))


class DealtSamples:
    """Held-out samples, in their order, each with the data owner that it was dealt to.

    A validation reads all at once, and returns loss and accuracy of each owner beside the means.

    Attributes:
        owners: number of the owner of each sample.
        source_names: names of all owners, by number.
        source_metrics: metrics that a validation returns for each owner.
    """

    source_metrics = ("accuracy",)

    def __init__(self, dataset: Any, owners: Indices, names: Sequence[str]) -> None:
        self.dataset, self.owners, self.source_names = dataset, owners, tuple(names)
        self.draws_nothing = bool(getattr(dataset, "draws_nothing", False))
        if hasattr(dataset, "read_joined"):
            self.read_joined = dataset.read_joined

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.owners)

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`."""
        return self.dataset[index]

    def source_of(self, index: int) -> str:
        """Return the name of the data owner of sample `index`."""
        return self.source_names[self.owners[index]]
