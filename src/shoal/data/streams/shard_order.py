"""Order of shards of unknown lengths: the reader and the time of each shard.

    epoch e    the shards in an order drawn by (seed, e), waiting in a row
    streams    64 of them, or as many as the largest power of two that is not above the shards;
               each holds the shard that it reads and the next one, taken from the row in turn
    turn       micro-batches take the next samples of one stream after another, around and around,
               but for those that are at their end
    the end    of the epoch, when no stream holds a shard: steps are full while samples are left,
               but for turns on a stream that ends in this step

The results of a step (`settle`) determine the next shard of each stream, the same on every rank and
under every layout. Data rank v mod D reads stream v if D divides the streams; otherwise every rank
reads all streams, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.data.loading.sample_order import permute
from shoal.data.streams.stream_order import STREAMS

HOLDS = 2
"""Shards that a stream holds: one that ends in a step is followed by the next at once."""

Turn = tuple[int, int]
"""(stream, number of samples requested from it)."""

Ended = tuple[int, int]
"""(shards of a stream that ended in a step, samples taken of its present shard)."""


def stream_count(shards: int) -> int:
    """Return the number of streams for so many shards.

    >>> [stream_count(shards) for shards in (1, 3, 64, 1000)]
    [1, 2, 64, 64]
    """
    return min(STREAMS, 1 << (shards.bit_length() - 1))


class ShardAssignment:
    """Shards of each stream and their consumed samples, in one epoch.

    held [streams]    shard numbers, the first is being read · taken [streams]  its consumed samples
    live [streams]    its shard is known to have a further sample
    """

    def __init__(self, shards: int, seed: int, epoch: int) -> None:
        self.order = permute(np.arange(shards), shards, seed, epoch).tolist()
        self.streams = stream_count(shards)
        self.held: list[list[int]] = [[] for _ in range(self.streams)]
        self.taken = [0] * self.streams
        self.live = [False] * self.streams
        self.dealt = 0
        self.turn = 0
        for _ in range(HOLDS):  # one each before any stream has two
            for shards_held in self.held:
                self._give(shards_held)

    def _give(self, held: list[int]) -> None:
        if self.dealt < len(self.order):
            held.append(self.order[self.dealt])
            self.dealt += 1

    @property
    def is_over(self) -> bool:
        """True when all shards were read to their ends."""
        return not any(self.held)

    def turns(self, batch: int, micro_batch: int) -> list[Turn]:
        """Return the micro-batches of the next step, over all ranks."""
        around = [*range(self.turn, self.streams), *range(self.turn)]
        alive = [stream for stream in around if self.held[stream]]
        sizes = [min(micro_batch, batch - at) for at in range(0, batch, micro_batch)]
        return [(alive[place % len(alive)], size) for place, size in enumerate(sizes)]

    def record_step(
        self, turns: Sequence[Turn], sizes: Sequence[int], ended: Mapping[int, Ended]
    ) -> None:
        """Record a finished step: the samples of its turns, and the streams in which a shard ended.

        Args:
            turns: none: the step only checked each stream for a sample.
        """
        for (stream, _), size in zip(turns, sizes, strict=True):
            self.taken[stream] += size
        for stream, (shards, taken) in ended.items():
            del self.held[stream][:shards]
            self.taken[stream] = taken
        for stream in {stream for stream, _ in turns} if turns else range(self.streams):
            self.live[stream] = bool(self.held[stream])
        if turns:
            self.turn = (turns[-1][0] + 1) % self.streams
        for held in self.held:
            while len(held) < HOLDS and self.dealt < len(self.order):
                self._give(held)

    def state(self) -> dict[str, Any]:
        """Return the positions of all streams; JSON values."""
        held = [list(one) for one in self.held]
        return {"held": held, "taken": list(self.taken), "dealt": self.dealt, "turn": self.turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`, in the same epoch of the same shards."""
        self.held = [list(one) for one in state["held"]]
        self.taken = list(state["taken"])
        self.dealt, self.turn = state["dealt"], state["turn"]
        self.live = [bool(held) for held in self.held]
