"""Encode sequence shards for a pipeline's transfers: the part, and integers that describe it.

A value between two layers is a tensor, or a shard of one that lies in parts on the ranks of tp, of
cp, or of both, one inside the other. The part itself is sent, to the same rank of the next stage.
Integers sent with it describe its shards, the outermost first: axis, dim, whether the gradients of
a gathered whole are summands, and the cuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from shoal.base.errors import BugError
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.sequence_shards import SequenceShard, ShardSpec, wrap_shard

ShardKind = tuple[Axis, type[SequenceShard]]
"""(axis, class of the shards whose parts lie on the ranks of that axis)."""


class StageCodec:
    """Encoder of values between stages; all ranks have the same kinds, in one order."""

    def __init__(self, kinds: Sequence[ShardKind]) -> None:
        self.kinds = tuple(kinds)

    def pack(self, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return the tensor to send, and integers that describe it to `unpack`."""
        if not isinstance(value, torch.Tensor):
            raise BugError(f"pipeline: a {type(value).__name__} cannot cross between stages")
        tag: list[int] = []
        while isinstance(value, SequenceShard):
            deal = value.deal
            place = next(k for k, (axis, _) in enumerate(self.kinds) if axis is deal.axis)
            tag += [place, deal.dim, int(deal.summands), len(deal.cuts), *deal.cuts]
            value = value.local
        return value, tuple(tag)

    def unpack(self, tensor: torch.Tensor, tag: tuple[int, ...]) -> Any:
        """Rebuild a sent value on the same rank of another stage."""
        rest, around = deque(tag), []
        while rest:
            place, dim, summands = (rest.popleft() for _ in range(3))
            cuts = tuple(rest.popleft() for _ in range(rest.popleft()))
            axis, kind = self.kinds[place]
            around.append((ShardSpec(axis, dim, cuts, bool(summands)), kind))
        for deal, kind in reversed(around):
            tensor = wrap_shard(tensor, deal, kind)
        return tensor
