"""What a loss asks of ranks each of which has some tokens of every sequence.

Hidden states or logits of such a rank show the whole's shape, hold this rank's tokens in `local`,
and have a `Sharing` as `sharing`. A loss that adds up over tokens looks at its own ones and sums.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Sharing(Protocol):
    """The ranks that share the sequences."""

    def own(self, targets: Tensor) -> Tensor:
        """This rank's tokens of a tensor that all ranks have whole."""

    def sum(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Both over the ranks; the total is differentiable."""
