"""How a pipeline sends what may be parts of a sequence: the part, and where it belongs.

A value between two layers is a tensor, or stands for one that lies in parts on the ranks of tp, of
cp, or of both, one inside the other. The part itself crosses, to the same rank of the next stage;
integers beside it tell what was around it, the outermost first: which axis, which dim, whether the
gradients of a gathered whole are summands, and the cuts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from shoal.base.errors import BugError
from shoal.parallel.spmd.autograd_collectives import Axis
from shoal.parallel.spmd.sequence_shards import Deal, SequenceShard, show

Kind = tuple[Axis, type[SequenceShard]]
"""The ranks of an axis, and what stands for a tensor that lies in parts on them."""


class Crossing:
    """How values cross between stages; all ranks have the same kinds, in one order."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.kinds = tuple(kinds)

    def pack(self, value: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The tensor to send, and integers that tell `unpack` what it is."""
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
        """The value again, on the same rank of another stage."""
        rest, around = deque(tag), []
        while rest:
            place, dim, summands = (rest.popleft() for _ in range(3))
            cuts = tuple(rest.popleft() for _ in range(rest.popleft()))
            axis, kind = self.kinds[place]
            around.append((Deal(axis, dim, cuts, bool(summands)), kind))
        for deal, kind in reversed(around):
            tensor = show(tensor, deal, kind)
        return tensor
