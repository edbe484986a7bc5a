"""Order of sharded data: 64 streams, each read by one rank, front to back but for a shuffle.

    pieces    a shard, or where shards are fewer than 1024 of like size a part of one: at most
              N/1024 neighbours, so that every stream has 16 or more
    epoch e   the pieces in an order drawn by (seed, e), one after another: N samples in a row
    stream v  its v-th of 64 equal parts: samples ⌊v·N/64⌋ … ⌊(v+1)·N/64⌋ − 1 of that row
    within    blocks of BLOCK samples, each shuffled by (seed, e, v, block); blocks in their order
    turn t    of the epoch takes the next samples of stream t mod 64; in the last round, of streams
              that are a sample longer or shorter, one follows on the other

A turn is a micro-batch if the user sets one: rank r of D runs turns r, r + D, …; else it is an
eighth of the batch: rank r of 2 runs turns 4r … 4r + 3 of every eight. If D divides 64, or those 8,
one rank has all turns of a stream. So one rank reads a piece (two at the border of streams), front
to back. The order does not depend on D: it follows from (seed, position, turn), and position and
turn are the loader's whole state. Source virtual shards for elastic resume: MosaicML Streaming's
"canonical nodes"; shuffling
            within a buffer: webdataset, `tf.data`
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.base.errors import ConfigError
from shoal.data.loading.sample_order import permute

STREAMS = 64
PIECES = 16
"""Least pieces per stream: they determine how finely data of few shards are mixed."""

BLOCK = 1024
"""Samples that are shuffled among each other, like a shuffle buffer."""

Indices = npt.NDArray[np.int64]


def check_degree(degree: int) -> None:
    """Raise ConfigError for data-parallel degrees that do not divide the streams."""
    if STREAMS % degree:
        near = max(d for d in range(1, min(degree, STREAMS) + 1) if STREAMS % d == 0)
        raise ConfigError(
            f"data.source: shards are read as {STREAMS} streams, each by one rank, and a "
            f"data-parallel degree of {degree} does not divide {STREAMS}; try: a degree of "
            f"{near}"
        )


class StreamOrder:
    """Order of sharded data: `order(start, stop, seed)` returns the indices of stream positions.

    Args:
        sizes: samples of each shard; sample numbers run over the concatenated shards.
        turn: samples of one turn.
    """

    def __init__(self, sizes: Sequence[int], turn: int) -> None:
        self.samples = sum(sizes)
        most = max(1, self.samples // (STREAMS * PIECES))
        cut = [min(most, size - at) for size in sizes for at in range(0, size, most)]
        self.sizes = np.array(cut, dtype=np.int64)
        self.turn = turn
        self._firsts = np.concatenate(([0], np.cumsum(self.sizes)[:-1]))
        bounds = np.arange(STREAMS + 1, dtype=np.int64) * self.samples // STREAMS
        self._starts, lengths = bounds[:-1], np.diff(bounds)
        self._rows: dict[tuple[int, int], tuple[Indices, Indices]] = {}
        self._even = int(lengths.min()) // turn  # rounds in which every turn is full
        self._rest = self._last_turns(lengths - self._even * turn)

    def _last_turns(self, left: Indices) -> tuple[Indices, Indices]:
        """Return (stream, position in it) of the samples after the even rounds, stream by stream.

        Args:
            left: remaining samples of each stream, at most one turn.
        """
        streams = np.repeat(np.arange(STREAMS), left)
        before = np.repeat(np.cumsum(left) - left, left)
        return streams, self._even * self.turn + np.arange(len(streams)) - before

    def _row(self, seed: int, epoch: int) -> tuple[Indices, Indices]:
        """Return the pieces in the epoch's order, and the start of each."""
        if (seed, epoch) not in self._rows:
            count = len(self.sizes)
            order = permute(np.arange(count), count, seed, epoch)
            begins = np.concatenate(([0], np.cumsum(self.sizes[order])[:-1]))
            self._rows = {(seed, epoch): (order, begins)}
        return self._rows[seed, epoch]

    def streams(self, offsets: Indices) -> tuple[Indices, Indices]:
        """Return the stream of each position of an epoch, and its position before the shuffle."""
        turns, within = np.divmod(offsets, self.turn)
        rounds, stream = np.divmod(turns, STREAMS)
        place = rounds * self.turn + within
        late = np.flatnonzero(rounds >= self._even)
        some = offsets[late] - self._even * self.turn * STREAMS
        stream[late], place[late] = self._rest[0][some], self._rest[1][some]
        return stream, place

    def __call__(self, start: int, stop: int, seed: int, *, shuffle: bool = True) -> Indices:
        """Return sample numbers [stop − start] of positions of one epoch; unshuffled: in order."""
        epoch = start // self.samples
        offsets = np.arange(start, stop, dtype=np.int64) - epoch * self.samples
        if not shuffle:
            return offsets
        stream, place = self.streams(offsets)
        ends = np.append(self._starts[1:], self.samples)
        key = stream * (self.samples + 1) + place // BLOCK
        for one in np.unique(key).tolist():
            mine = np.flatnonzero(key == one)
            v, block = divmod(one, self.samples + 1)
            size = min(BLOCK, int(ends[v] - self._starts[v]) - block * BLOCK)
            drawn = permute(place[mine] % BLOCK, size, seed + (v + 1 << 64) + (block << 80), epoch)
            place[mine] = block * BLOCK + drawn
        row = self._starts[stream] + place
        order, begins = self._row(seed, epoch)
        at = np.searchsorted(begins, row, side="right") - 1
        return self._firsts[order[at]] + row - begins[at]
