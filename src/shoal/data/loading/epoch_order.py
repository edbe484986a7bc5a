"""Deal the batches of a torch DataLoader to ranks, in an order that a resume inside an epoch keeps.

A state that is saved inside an epoch has the generators of its start, and torch's own as it was
before the batch that was read ahead: without the batches that were used, the epoch goes on in the
same order, and with the same draws of its samples.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


def deal_batches(
    batches: Iterable[Sequence[int]], rank: int, ranks: int, size: int, *, drops: bool, even: bool
) -> Iterator[list[int]]:
    """Yield a rank's batches of `size` indices, dealt in turn; equally many per rank if `even`.

    >>> [list(deal_batches([[0, 1], [2, 3], [4]], r, 2, 2, drops=False, even=True)) for r in (0, 1)]
    [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    """
    first: list[int] = []
    turn: list[list[int]] = []
    for number, batch in enumerate(batches):
        if number < ranks:
            first += batch
        turn.append(list(batch))
        if len(turn) == ranks and len(batch) == size:
            yield turn[rank]
            turn = []
    if drops or not turn:
        return
    if even:
        filled = itertools.chain(*turn, itertools.cycle(first))
        turn = [list(itertools.islice(filled, size)) for _ in range(ranks)]
    if rank < len(turn):
        yield turn[rank]


def cut_batches(batches: Iterable[Sequence[int]], size: int) -> Iterator[Sequence[int]]:
    """Cut batches into parts of `size` indices, before they are dealt.

    >>> list(cut_batches([[0, 1, 2], [3]], 2))
    [[0, 1], [2], [3]]
    """
    for batch in batches:
        yield from (batch[at : at + size] for at in range(0, len(batch), size))


@dataclass
class EpochOrder:
    """Position in the order of batches, which a loader shares with copies that skip batches.

    Attributes:
        number: epochs until now.
        is_open: the epoch was begun and has not ended.
        ended: batches of the epoch, once its last one was returned; 0 before.
        order: state of the order's generator at the epoch's start; None: it has none.
        draws: states of torch's generator at the epoch's start, and before the batch read ahead.
        loaded: all of this is a saved state's, and no epoch was begun since.
    """

    number: int = 0
    is_open: bool = False
    ended: int = 0
    order: torch.Tensor | None = None
    draws: list[torch.Tensor] = field(default_factory=list)
    loaded: bool = False

    @property
    def is_inside(self) -> bool:
        """Return whether batches of the epoch remain."""
        return self.is_open and not self.ended

    def start(self, generator: torch.Generator | None) -> None:
        """Keep the generators of an epoch's start."""
        self.order = None if generator is None else generator.get_state()
        self.draws = [torch.get_rng_state()]

    def state(self, generator: torch.Generator | None) -> dict[str, Any]:
        """Return what all ranks have in common, as plain values."""
        start = self.order if self.is_inside else None
        return {
            "epoch": self.number + (self.is_open and self.ended > 0),
            "draws": "" if generator is None else encode_state(generator.get_state()),
            "inside": self.is_inside,
            "start": "" if start is None else encode_state(start),
        }

    def rank_state(self) -> list[Any]:
        """Return this rank's part, as plain values."""
        return [self.ended, *map(encode_state, self.draws if self.is_inside else ())]

    def load(self, state: dict[str, Any], generator: torch.Generator | None) -> None:
        """Resume from `state`; older states have no position inside an epoch."""
        if generator is not None and state["draws"]:
            generator.set_state(decode_state(state["draws"]))
        start = state.get("start")
        self.number, self.is_open = state["epoch"], state.get("inside", False)
        self.order = decode_state(start) if start else None
        self.ended, self.draws, self.loaded = 0, [], True

    def load_rank_state(self, state: Sequence[Any]) -> None:
        """Resume from `rank_state`, if there were as many ranks."""
        self.ended, *draws = state
        self.draws = [decode_state(one) for one in draws]

    def read_on(
        self, read: Callable[[], Iterator[Any]], generator: torch.Generator | None
    ) -> Iterator[Any]:
        """Return the rest of a saved epoch; torch's generator is then as the state left it.

        Args:
            read: returns the batches that are left, in the order that the generators draw now.
            generator: of the order.
        """
        left = torch.get_rng_state()
        if self.order is not None and generator is not None:
            generator.set_state(self.order)
        self.draws = self.draws or [left]
        torch.set_rng_state(self.draws[0])
        batches = read()
        torch.set_rng_state(self.draws[-1])
        ahead = list(itertools.islice(batches, 1))
        torch.set_rng_state(left)
        return itertools.chain(ahead, batches)


def encode_state(state: torch.Tensor) -> str:
    """Return a generator's state as text."""
    return "~" + base64.b85encode(zlib.compress(state.numpy().tobytes())).decode()


def decode_state(text: str) -> torch.Tensor:
    """Return a generator's state from its text, or from hexadecimal digits of an older state."""
    is_hex = not text.startswith("~")
    held = bytes.fromhex(text) if is_hex else zlib.decompress(base64.b85decode(text[1:]))
    return torch.frombuffer(bytearray(held), dtype=torch.uint8)
