"""The order of data in shards whose lengths nobody knows: which shard is read when, by whom.

    epoch e    the shards in an order drawn by (seed, e), waiting in a row
    streams    64 of them, or as many as the largest power of two that is not above the shards;
               each holds the shard that it reads and the next one, taken from the row in turn
    turn       micro-batches take the next samples of one stream after another, around and around,
               but for those that are at their end
    the end    of the epoch, when no stream holds a shard: steps are full while samples are left,
               but for turns on a stream that ends in this step

What happened in a step (`settle`) changes who gets which shard next, the same on every rank and
under every layout. Stream v is read by data rank v mod D where D divides the streams; otherwise
every rank reads all of them, in the same order.
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
"""Stream, and how many samples are wanted of it."""

Ended = tuple[int, int]
"""How many shards of a stream ended in a step, and samples taken of the one it then stands in."""


def stream_count(shards: int) -> int:
    """How many streams so many shards make.

    >>> [stream_count(shards) for shards in (1, 3, 64, 1000)]
    [1, 2, 64, 64]
    """
    return min(STREAMS, 1 << (shards.bit_length() - 1))


class Deal:
    """Which shards each stream holds and what was taken of them, in one epoch.

    held [streams]    shard numbers, the first is being read · taken [streams]  its samples so far
    live [streams]    its shard is known to have another sample
    """

    def __init__(self, shards: int, seed: int, epoch: int) -> None:
        self.order = permute(np.arange(shards), shards, seed, epoch).tolist()
        self.streams = stream_count(shards)
        self.held: list[list[int]] = [[] for _ in range(self.streams)]
        self.taken = [0] * self.streams
        self.live = [False] * self.streams
        self.dealt = 0
        self.turn = 0
        for _ in range(HOLDS):  # one each before anybody has two
            for shards_held in self.held:
                self._give(shards_held)

    def _give(self, held: list[int]) -> None:
        if self.dealt < len(self.order):
            held.append(self.order[self.dealt])
            self.dealt += 1

    @property
    def is_over(self) -> bool:
        """Whether all shards were read to their ends."""
        return not any(self.held)

    def turns(self, batch: int, micro_batch: int) -> list[Turn]:
        """The micro-batches of the next step, over all ranks."""
        around = [*range(self.turn, self.streams), *range(self.turn)]
        alive = [stream for stream in around if self.held[stream]]
        sizes = [min(micro_batch, batch - at) for at in range(0, batch, micro_batch)]
        return [(alive[place % len(alive)], size) for place, size in enumerate(sizes)]

    def settle(
        self, turns: Sequence[Turn], sizes: Sequence[int], ended: Mapping[int, Ended]
    ) -> None:
        """A step is over: what its turns gave, and the streams in which a shard ended.

        Args:
            turns: none: every stream was asked whether it has a sample.
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
        """Where all streams stand; JSON values."""
        held = [list(one) for one in self.held]
        return {"held": held, "taken": list(self.taken), "dealt": self.dealt, "turn": self.turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was taken, in the same epoch of the same shards."""
        self.held = [list(one) for one in state["held"]]
        self.taken = list(state["taken"])
        self.dealt, self.turn = state["dealt"], state["turn"]
        self.live = [bool(held) for held in self.held]
