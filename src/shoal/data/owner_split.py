"""Split one dataset over data owners, for experiments: `data.split`.

    even            every owner gets ⌊n/N⌋ or ⌈n/N⌉ samples, drawn from all
    labels:K        owner i gets the labels i·K … i·K + K − 1, modulo the number of labels; the
                    owners of a label share its samples evenly
    dirichlet:α     of each label, the owners get shares drawn from Dirichlet(α, …, α): with α = 0.1
                    most owners have a few labels, and some have no sample at all

The deal depends on `train.seed`, the samples' labels and the number of owners alone. Each sample
belongs to one owner. Held-out samples are not dealt.

Source: Yurochkin et al. 2019 and Li et al. 2022 (NIID-Bench) for dirichlet, per label as there; no
owner is given a least number of samples
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.base.errors import ConfigError
from shoal.config.owners import parse_split

Indices = npt.NDArray[np.int64]


def deal_samples(dataset: Any, owners: int, split: str, seed: int) -> list[Indices]:
    """Return the sample numbers of every data owner, ascending; an owner may have none.

    Args:
        dataset: with a length and an index; labels are read for all kinds but even.

    Raises:
        ConfigError: another form, samples without labels, or labels that no owner would get.
    """
    kind, number = parse_split(split)
    generator = np.random.Generator(np.random.PCG64([seed, owners]))
    if kind == "even":
        order = generator.permutation(len(dataset))
        return [np.sort(order[owner::owners]).astype(np.int64) for owner in range(owners)]
    by_label = _group_by_label(_read_labels(dataset, split), generator)
    parts: list[list[Indices]] = [[] for _ in range(owners)]
    if kind == "labels":
        _deal_labels(by_label, parts, int(number), split)
    else:
        _deal_dirichlet(by_label, parts, number, generator)
    return [
        np.sort(np.concatenate(part)) if part else np.empty(0, dtype=np.int64) for part in parts
    ]


def _deal_labels(
    by_label: Sequence[Indices], parts: list[list[Indices]], each: int, split: str
) -> None:
    """Split the samples of every label evenly over the data owners that have the label."""
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
    for indices, some in zip(by_label, holders, strict=True):
        for place, owner in enumerate(some):
            parts[owner].append(indices[place :: len(some)])


def _deal_dirichlet(
    by_label: Sequence[Indices],
    parts: list[list[Indices]],
    alpha: float,
    generator: np.random.Generator,
) -> None:
    """Split the samples of every label by shares drawn from a Dirichlet distribution."""
    for indices in by_label:
        shares = generator.dirichlet([alpha] * len(parts))
        cuts = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
        for owner, part in enumerate(np.split(indices, cuts)):
            parts[owner].append(part)


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
