"""Division of an island's message among its ranks: one rank sends each element.

Under fsdp or tp each rank holds its own part of a parameter and sends that. Replicated parts (under
ddp, or norms under tp) are divided among their ranks in equal pieces, so that all connections are
used. A gather among these ranks reassembles them:

    message of a fragment ── cut ──> this rank's flat piece ── the plane ──> its mean
    mean of every parameter here <── join (gather among holders) ── mean of the flat piece

The ranks of two islands with the same layout get the same pieces, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoal.base.plans.tensor_shards import Shard
from shoal.fabric import World
from shoal.fabric.axis_worlds import partition_world

Holders = tuple[int, ...]
"""Ranks that hold the same part of a tensor, ascending."""


class MessageShards:
    """Division of an island's message among its ranks, so that each element is sent once.

    The constructor and `join` are collectives: all ranks of the island must call them.

    Args:
        shards: positions of this rank's parts in the whole tensors, by name.
        inner: the island's ranks, on a gloo group that no other thread uses.
        dtype: dtype in which messages are summed.
    """

    def __init__(self, shards: Mapping[str, Shard], inner: World, dtype: torch.dtype) -> None:
        self.inner, self.dtype = inner, dtype
        mine = {name: _boxes(shard) for name, shard in shards.items() if shard.slices}
        told = inner.gather_json(mine)
        self.holders: dict[str, Holders] = {
            name: tuple(rank for rank, other in enumerate(told) if other.get(name) == boxes)
            for name, boxes in mine.items()
        }
        everyones = {
            tuple(rank for rank, other in enumerate(told) if other.get(name) == boxes)
            for one in told
            for name, boxes in one.items()
        }
        # Every rank must create every group, also those it is not in.
        made = {ranks: partition_world(inner, [ranks]) for ranks in sorted(everyones)}
        self.groups = {ranks: made[ranks] for ranks in sorted(set(self.holders.values()))}

    def cut(self, message: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's flat piece of a message: [elements] in `dtype`.

        Args:
            message: this rank's part of each tensor, by name; tensors without a part are absent.
        """
        pieces = []
        for ranks, group in self.groups.items():
            whole = self._flat(message, ranks)
            length = -(-whole.numel() // len(ranks))
            piece = whole[group.rank * length : (group.rank + 1) * length]
            pieces.append(_padded(piece, length))
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=self.dtype)

    def count_elements(self, like: Mapping[str, torch.Tensor]) -> int:
        """Return the elements of this rank's flat piece of a message of tensors as in `like`."""
        totals = {
            ranks: sum(like[name].numel() for name in self._names(like, ranks))
            for ranks in self.groups
        }
        return sum(-(-total // len(ranks)) for ranks, total in totals.items())

    def join(self, mean: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Reassemble this rank's part of every tensor from the mean of the pieces.

        Args:
            mean: [elements], in the layout of `cut`.
            like: tensors with the shapes of the message, by name.
        """
        found: dict[str, torch.Tensor] = {}
        at = 0
        for ranks, group in self.groups.items():
            names = self._names(like, ranks)
            total = sum(like[name].numel() for name in names)
            length = -(-total // len(ranks))
            if not length:
                continue
            whole = group.all_gather(mean[at : at + length]).reshape(-1)[:total]
            at += length
            for name, part in zip(
                names, whole.split([like[name].numel() for name in names]), strict=True
            ):
                found[name] = part.view(like[name].shape)
        return found

    def _names(self, tensors: Mapping[str, torch.Tensor], ranks: Holders) -> list[str]:
        return [name for name in tensors if self.holders.get(name) == ranks]

    def _flat(self, message: Mapping[str, torch.Tensor], ranks: Holders) -> torch.Tensor:
        parts = [message[name].reshape(-1).to(self.dtype) for name in self._names(message, ranks)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype)


def _padded(piece: torch.Tensor, length: int) -> torch.Tensor:
    if piece.numel() == length:
        return piece
    return torch.cat([piece, piece.new_zeros(length - piece.numel())])


def _boxes(shard: Shard) -> Sequence[Sequence[Sequence[int]]]:
    return [[list(span) for span in box] for box in shard.slices]
