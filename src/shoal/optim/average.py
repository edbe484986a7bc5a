"""Exponential moving average of the weights, which often evaluates better than the weights.

    average ← average + (1 − d)·(weights − average)    d = min(decay, (1 + t) / (10 + t))

after every update t = 0, 1, 2, …: the rising d forgets the random start within a few hundred steps.
Every rank averages only the pieces that it steps, in at least float32, so the cost in memory is
that of one more optimizer state. Buffers (BatchNorm's statistics) are not averaged.

Source: Polyak and Juditsky 1992; the rise of d as in TensorFlow's ExponentialMovingAverage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shoal.base.errors import BugError, CheckpointError, ConfigError

RISE = 10


class WeightAverage:
    """An exponential moving average of this rank's pieces of the parameters, float32 at least.

    Attributes:
        decay: share of the old average that stays, once risen; 0 ≤ decay < 1.
        parameters: this rank's pieces by name: `update` reads them, `swap_weights` writes them.
        updates: number of updates in the average; part of a checkpoint's record.

    Raises:
        ConfigError: decay is out of range.
    """

    def __init__(self, decay: float, parameters: Mapping[str, nn.Parameter]) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"average decay = {decay}: wanted 0 ≤ decay < 1; try: 0.999")
        self.decay = decay
        self.updates = 0
        self._pieces = dict(parameters)
        self._averages = {name: _copy(piece) for name, piece in self._pieces.items()}
        self._swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of a committed step to the average; skipped steps do not count."""
        if self._swapped:
            raise BugError("the average was updated while it stood in for the weights")
        keep = min(self.decay, (1 + self.updates) / (RISE + self.updates))
        self.updates += 1
        if self._pieces:
            averages = list(self._averages.values())
            weights = [
                piece.detach().to(average.dtype)
                for piece, average in zip(self._pieces.values(), averages, strict=True)
            ]
            torch._foreach_lerp_(averages, weights, 1 - keep)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name, in the shapes of the pieces, for a checkpoint."""
        return dict(self._averages)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], updates: int) -> None:
        """Load saved averages into the pieces' shapes.

        Args:
            updates: as saved; 0 to start again from `tensors`, e.g. from weights just restored.

        Raises:
            CheckpointError: a piece is missing or has another number of elements.
        """
        for name, average in self._averages.items():
            if name not in tensors or tensors[name].numel() != average.numel():
                found = list(tensors[name].shape) if name in tensors else "nothing"
                raise CheckpointError(
                    f"average.{name}: {list(average.shape)} wanted, {found} in the checkpoint"
                )
        for name, average in self._averages.items():
            average.copy_(tensors[name].reshape(average.shape))
        self.updates = updates

    @contextmanager
    def swap_weights(self, publish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Replace the weights by the averages inside the block, and restore them bit for bit.

        Args:
            publish: broadcasts changed pieces to all ranks (`reducer.publish`). Every rank calls it
                on entering and on leaving.

        Note:
            After an exception whole weights stay averaged until the next `publish`. Inside the
            block this rank holds one more copy of its pieces.
        """
        if self._swapped:
            raise BugError("the average stands in for the weights already")
        kept = {name: piece.detach().clone() for name, piece in self._pieces.items()}
        self._swapped = True
        try:
            self._overwrite_weights(self._averages)
            publish()
            yield
        except BaseException:
            # The exception may be on this rank alone: `publish` would wait for the other ranks.
            self._overwrite_weights(kept)
            self._swapped = False
            raise
        self._overwrite_weights(kept)
        self._swapped = False
        publish()

    @torch.no_grad()
    def _overwrite_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, piece in self._pieces.items():
            piece.copy_(values[name])


def _copy(piece: nn.Parameter) -> torch.Tensor:
    wide = torch.promote_types(piece.dtype, torch.float32)
    return piece.detach().to(wide, copy=True)
