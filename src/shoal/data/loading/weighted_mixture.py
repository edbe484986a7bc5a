"""Mixture of datasets by weight: the source of sample p is computed from p alone.

    weights 0.7, 0.3      round of 10:  a b a a a b a a b a     (as `deal_round` deals them)
    position p ──> round p // 10, turn p mod 10 ──> source s, and that it is s's k-th sample so far
    s, k ──sample_order.py──> epoch k // n_s of s alone, a permutation of k mod n_s

Of the first n samples a source of weight w has ⌊n·w⌋ or ⌈n·w⌉, for every n, without random draws.
Every source is an endless stream, so none of its samples repeats before all were used. An epoch of
the mixture ends before the first source would repeat; the other sources continue from there. Source
Tijdeman 1980, "The chairman assignment problem": of k sources the count is never
            further from n·w than 1 − 1/(2k − 2)
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from shoal.data.loading.sample_order import permute
from shoal.data.loading.sample_seeds import draws_nothing


def deal_round(parts: Sequence[int]) -> list[int]:
    """Return the source of each of sum(parts) samples of one round, parts[s] of them from s.

    >>> deal_round([7, 3])
    [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    """
    if len(parts) == 1:
        return [0] * parts[0]
    whole, spread = sum(parts), 2 * len(parts) - 2
    common = math.lcm(*parts)
    taken = [0] * len(parts)
    dealt = []
    for number in range(1, whole + 1):
        # how far each source would be behind, in samples × whole
        behind = [number * part - had * whole for part, had in zip(parts, taken, strict=True)]
        due = [s for s in range(len(parts)) if behind[s] * spread >= whole]
        # whose last moment comes first: (1 − 1/spread − behind) / weight is least
        source = min(
            due, key=lambda s: ((spread - 1) * whole - spread * behind[s]) * (common // parts[s])
        )
        taken[source] += 1
        dealt.append(source)
    return dealt


class WeightedMixture(Dataset[Any]):
    """Dataset of parts[s] samples of datasets[s] a round: `WeightedMixture(datasets, parts)`.

    `len()` is an epoch: the samples before the first dataset would repeat. Indices run over all
    datasets, concatenated; `stream_order` maps position p to an index for the loader.

    Attributes:
        source_names: name of each dataset's source, if given.
    """

    def __init__(
        self, datasets: Sequence[Any], parts: Sequence[int], source_names: Sequence[str] = ()
    ) -> None:
        self.datasets = list(datasets)
        self.parts = list(parts)
        self.source_names = tuple(source_names)
        self.sizes = [len(dataset) for dataset in self.datasets]
        self.firsts = list(itertools.accumulate(self.sizes, initial=0))
        self.draws_nothing = all(draws_nothing(dataset) for dataset in self.datasets)
        self._turns = np.array(deal_round(parts), dtype=np.int64)
        self._had = np.zeros(len(self._turns), dtype=np.int64)
        ends = []
        for source, (size, part) in enumerate(zip(self.sizes, self.parts, strict=True)):
            places = np.flatnonzero(self._turns == source)
            self._had[places] = np.arange(part)
            rounds, more = divmod(size, part)
            ends.append(rounds * len(self._turns) + int(places[more]))
        self.samples = min(ends)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        """Return sample `index` of the concatenated datasets; may raise IndexError."""
        if not 0 <= index < self.firsts[-1]:
            raise IndexError(f"sample {index} of {self.firsts[-1]}")
        source = self._number_of(index)
        return self.datasets[source][index - self.firsts[source]]

    def source_of(self, index: int) -> str:
        """Return the name of the source of sample `index` of the concatenated datasets."""
        return self.source_names[self._number_of(index)]

    def _number_of(self, index: int) -> int:
        return bisect.bisect_right(self.firsts, index) - 1

    def stream_order(
        self, start: int, stop: int, seed: int, *, shuffle: bool = True
    ) -> npt.NDArray[np.int64]:
        """Return indices [stop − start] of stream positions start … stop − 1; no list is stored."""
        rounds, turn = np.divmod(np.arange(start, stop, dtype=np.int64), len(self._turns))
        sources = self._turns[turn]
        indices = np.empty(stop - start, dtype=np.int64)
        for source, size in enumerate(self.sizes):
            mine = np.flatnonzero(sources == source)
            epochs, places = np.divmod(
                rounds[mine] * self.parts[source] + self._had[turn[mine]], size
            )
            if shuffle:
                for epoch in np.unique(epochs).tolist():
                    now = epochs == epoch
                    places[now] = permute(places[now], size, seed + (source << 64), epoch)
            indices[mine] = self.firsts[source] + places
        return indices
