"""Balance of tokens over experts: counted in every pass, reported once every `EVERY` steps.

The other ranks wait for the rank of the fullest expert. So a notice reports the fullest expert's
number of places, relative to the mean of its layer. Counts stay on the device; once every `EVERY`
steps they are summed over data-parallel ranks and read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.fabric import World

EVERY = 100
"""Steps between two notices."""


class ExpertLoads:
    """Counts of the (token, choice) pairs of every expert since the last notice.

    Attributes:
        layers: number of experts by layer.
        data: ranks that run other micro-batches.
        notices: list that receives lines for the user.
        joining: the current pass only joins the others' exchanges: its results have weight 0.
    """

    def __init__(self, layers: Mapping[str, int], data: World, notices: list[str]) -> None:
        self.data, self.notices = data, notices
        self.counts = {
            name: torch.zeros(experts + 1, dtype=torch.long, device=data.device)
            for name, experts in layers.items()
        }
        self.steps = 0
        self.counting = self.joining = False

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Open a training pass, which is counted unless it only joins the others' exchanges."""
        before = self.counting, self.joining
        self.counting, self.joining = index >= 0, index < 0
        try:
            yield
        finally:
            self.counting, self.joining = before

    def add_counts(self, name: str, counts: Tensor) -> None:
        """Add a layer's (token, choice) pairs by expert: [experts + 1], the last for none."""
        if self.counting:
            self.counts[name] += counts

    def commit(self, uneven: bool) -> None:
        """Count an update; every `EVERY` updates, on all ranks alike, report the balance."""
        self.steps += 1
        if self.steps % EVERY:
            return
        told = torch.cat(list(self.counts.values()))
        self.data.all_reduce(told)
        rows = told.split([len(row) for row in self.counts.values()])
        self.notices.append(format_balance(dict(zip(self.counts, rows, strict=True)), EVERY))
        for row in self.counts.values():
            row.zero_()


def format_balance(counts: dict[str, Tensor], steps: int) -> str:
    """Format the notice on some steps: counts [experts + 1] by layer, the last of no expert.

    >>> format_balance({"a": torch.tensor([3, 1, 0]), "b": torch.tensor([4, 0, 4])}, 100)
    'experts over 100 steps: the fullest of b got 2.00 × the mean of its layer (1.75 × over all \
layers), 1 of 4 got nothing, 33.3 % of places had none'
    """
    layers = {name: row.tolist() for name, row in counts.items()}
    loads = {name: row[:-1] for name, row in layers.items()}
    ratios = {name: max(own) * len(own) / max(1, sum(own)) for name, own in loads.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    idle = sum(not count for own in loads.values() for count in own)
    every = sum(len(own) for own in loads.values())
    nobody = sum(row[-1] for row in layers.values()) / max(1, sum(map(sum, layers.values())))
    return (
        f"experts over {steps} steps: the fullest of {worst} got {ratios[worst]:.2f} × the mean of "
        f"its layer ({sum(ratios.values()) / len(ratios):.2f} × over all layers), {idle} of "
        f"{every} got nothing, {100 * nobody:.1f} % of places had none"
    )
