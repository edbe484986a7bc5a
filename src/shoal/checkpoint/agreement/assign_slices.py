"""Assign each slice to one writer rank, so that all ranks write about as many bytes.

    1. a slice that one rank holds is written by that rank
    2. slices with several holders go, largest first, to the holder with the fewest bytes to write

Every rank computes this from the same gathered offers and gets the same answer (ties go to the
lower rank, then by name), so no further message is needed. Largest-first is within 4/3 of the best
balance (Graham 1969, for holders = all ranks). No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.errors import CheckpointError
from shoal.base.plans.tensor_shards import DTYPES, Box
from shoal.checkpoint.format import boxes

Offer = tuple[str, tuple[int, ...], str, Box]
"""A slice that a rank holds: name, global shape, dtype, box."""


@dataclass(frozen=True)
class WriteAssignment:
    """Assignment of slices to ranks: for each rank its (name, box), and the bytes of all ranks."""

    shares: list[list[tuple[str, Box]]]
    total_bytes: int


def assign_writers(offers: Sequence[Sequence[Offer]]) -> WriteAssignment:
    """Assign every offered slice to one writer rank.

    Args:
        offers: by rank.

    Raises:
        CheckpointError: ranks disagree about a tensor, or their slices do not tile it.

    >>> w = ("w", (4,), "float32", ((0, 4),))
    >>> b = ("b", (2,), "float32", ((0, 2),))
    >>> assign_writers([[w, b], [w, b]]).shares
    [[('w', ((0, 4),))], [('b', ((0, 2),))]]
    """
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, offered in enumerate(offers):
        for name, shape, dtype, box in offered:
            if kinds.setdefault(name, (shape, dtype)) != (shape, dtype):
                raise CheckpointError(
                    f"{name}: rank {rank} has {dtype} {list(shape)}, "
                    f"a lower rank {kinds[name][1]} {list(kinds[name][0])}"
                )
            holders.setdefault((name, box), []).append(rank)
    _check_whole(kinds, holders)
    loads = [0] * len(offers)
    shares: list[list[tuple[str, Box]]] = [[] for _ in offers]
    sizes = {key: boxes.elements(key[1]) * DTYPES[kinds[key[0]][1]][1] for key in holders}
    order = sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key))
    for key in order:
        writer = min(holders[key], key=lambda rank: (loads[rank], rank))
        loads[writer] += sizes[key]
        shares[writer].append(key)
    return WriteAssignment(shares, sum(loads))


def _check_whole(
    kinds: dict[str, tuple[tuple[int, ...], str]], holders: dict[tuple[str, Box], list[int]]
) -> None:
    held: dict[str, list[Box]] = {}
    for name, box in holders:
        held.setdefault(name, []).append(box)
    for name, (shape, _) in kinds.items():
        problem = boxes.explain_untiled(shape, held[name])
        if problem:
            raise CheckpointError(f"{name} {list(shape)}: {problem}, over all ranks")
