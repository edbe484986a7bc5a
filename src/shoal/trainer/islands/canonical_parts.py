"""Exchange between the parts of an island's layout and its canonical units, whatever the layout.

    parts of this layout     boxes of each tensor, replicated or not      (`Shard`)
        │ collect            each number is sent once, by the rank that a checkpoint would choose
        ▼
    canonical units          consecutive numbers of the flat tensors      (`canonical_units.py`)
        │ distribute         each rank gets every number that it holds
        ▼
    parts of this layout

Both are one all-to-all in host memory, in the dtype in which changes are summed. With one process
both are views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.base.errors import BugError
from shoal.base.plans.tensor_shards import Box, Shard, flat_slices
from shoal.checkpoint.agreement.assign_slices import assign_writers
from shoal.checkpoint.agreement.rank_pieces import view_patch
from shoal.checkpoint.format import boxes
from shoal.fabric import World
from shoal.fabric.exchanges.all_to_all import all_to_all_rows
from shoal.islands.changing.canonical_outer import CanonicalOuterState
from shoal.islands.changing.canonical_units import (
    UNIT,
    CanonicalUnits,
    Unit,
    cut_units,
    join_segments,
)
from shoal.islands.method import MergedWeights, MergeMethod
from shoal.islands.outer_optimizer import OuterState
from shoal.parallel.program import Part

Patches = Mapping[str, Sequence[boxes.Patch]]
"""Boxes of one rank within its flat part of each tensor, by name."""


class _Move(NamedTuple):
    """A box that one rank sends to another, and where it lies in the flat parts of both."""

    name: str
    box: Box
    source: boxes.Patch
    target: boxes.Patch


class LayoutExchange:
    """Exchange of some tensors between this island's layout and its canonical units.

    `collect` and `distribute` are collectives of the island's ranks.

    Args:
        parts: this rank's parts, by name.
        ranges: by rank: its range of each flat tensor.
        world: the island's ranks, on a gloo group.
        dtype: of the flat numbers.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        ranges: Sequence[Mapping[str, tuple[int, int]]],
        world: World,
        dtype: torch.dtype,
    ) -> None:
        self.world, self.dtype = world, dtype
        self.shapes = {name: tensor.shape for name, (tensor, _) in parts.items()}
        self.range = ranges[world.rank]
        self._sent: list[list[_Move]] = []
        if world.size == 1:
            return
        offered = {
            name: [list(shard.global_shape), _list_boxes(shard)]
            for name, (_, shard) in parts.items()
            if shard.slices
        }
        told = world.gather_json(offered)
        wholes = {name: tuple(shape) for one in told for name, (shape, _) in one.items()}
        held = [{name: _patches(_read(found)) for name, (_, found) in one.items()} for one in told]
        chosen = _choose_senders(wholes, held)
        flat = [
            {name: _patches(flat_slices(wholes[name], *span)) for name, span in one.items()}
            for one in ranges
        ]
        rank, everyone = world.rank, range(world.size)
        self._collected = (
            [_find_moves(chosen[rank], flat[other]) for other in everyone],
            [_find_moves(chosen[other], flat[rank]) for other in everyone],
        )
        self._distributed = (
            [_find_moves(flat[rank], held[other]) for other in everyone],
            [_find_moves(flat[other], held[rank]) for other in everyone],
        )

    def collect(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's canonical numbers of each tensor, flat, in host memory.

        Args:
            local: this rank's part of each tensor.
        """
        flat = {
            name: local[name].detach().to("cpu", self.dtype).contiguous().view(-1)
            for name in self.shapes
        }
        if self.world.size == 1:
            return {name: flat[name] for name in self.range}
        sizes = {name: stop - start for name, (start, stop) in self.range.items()}
        return self._exchange(*self._collected, flat, sizes)

    def distribute(self, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of each tensor, in the shape of its layout, in host memory.

        Args:
            numbers: this rank's canonical numbers of each tensor, flat.
        """
        if self.world.size == 1:
            return {name: numbers[name].view(self.shapes[name]) for name in self.range}
        sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        found = self._exchange(*self._distributed, numbers, sizes)
        return {name: flat.view(self.shapes[name]) for name, flat in found.items()}

    def _exchange(
        self,
        sent: Sequence[Sequence[_Move]],
        received: Sequence[Sequence[_Move]],
        flat: Mapping[str, Tensor],
        sizes: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Send boxes of flat tensors to all ranks; return the received ones in flat tensors."""
        rows = [_view(flat[one.name], one.source, one.box) for moves in sent for one in moves]
        packed = torch.cat([row.reshape(-1) for row in rows]) if rows else torch.empty(0)
        arrived = all_to_all_rows(self.world, packed.to(self.dtype), _count(sent), _count(received))
        found = {name: torch.empty(size, dtype=self.dtype) for name, size in sizes.items()}
        at = 0
        for one in (one for moves in received for one in moves):
            stop = at + boxes.elements(one.box)
            target = _view(found[one.name], one.target, one.box)
            target.copy_(arrived[at:stop].view(target.shape))
            at = stop
        return found


class CanonicalParts:
    """Canonical units of an island, and the exchange with the parts of its layout.

    The constructor is a collective of the island's ranks.

    Args:
        weights, plain: this rank's parts of the merged weights, and of the running statistics.
        world: the island's ranks, on a gloo group that the training threads use.
        dtype: in which changes are summed.

    Attributes:
        segments: this rank's range of each flat tensor, cut at the ends of units.
        shards: of these ranges, by name.
        anchor: the merged weights in the parts of the layout, for a method that pulls towards them.
    """

    def __init__(
        self,
        weights: Mapping[str, Part],
        plain: Mapping[str, Part],
        world: World,
        dtype: torch.dtype,
    ) -> None:
        self.world, self.dtype = world, dtype
        shapes = [_gather_shapes(kind, world) for kind in (weights, plain)]
        sizes = [{name: math.prod(shape) for name, shape in one.items()} for one in shapes]
        self.units = CanonicalUnits(cut_units(sizes[0], UNIT), cut_units(sizes[1], UNIT))
        own = [self.units.of_rank(rank, world.size) for rank in range(world.size)]
        self.segments = join_segments(own[world.rank].coded)
        self.weights = LayoutExchange(weights, [_spans(one.coded) for one in own], world, dtype)
        self.plain = LayoutExchange(plain, [_spans(one.plain) for one in own], world, dtype)
        self.has_statistics = bool(self.units.plain)
        self.shards = {
            name: Shard(name, shapes[0][name], _name_of(dtype), flat_slices(shapes[0][name], *span))
            for name, span in self.weights.range.items()
        }
        self.anchor = LocalWeights({})
        self._layout = {name: shard for name, (_, shard) in weights.items()}

    def list_merged(self, outer: MergedWeights) -> dict[str, Part]:
        """Return the merged weights in the parts of the layout; a collective of the ranks."""
        found = self.weights.distribute(outer.weights)
        dtype = _name_of(self.dtype)
        return {n: (tensor, replace(self._layout[n], dtype=dtype)) for n, tensor in found.items()}

    def open_outer(self, method: MergeMethod, local: Mapping[str, Tensor]) -> OuterState:
        """Return W at the start: this rank's units of the weights.

        Args:
            local: this rank's parts of them.
        """
        numbers = self.weights.collect(local)
        outer = CanonicalOuterState(numbers, method.optimizer_builder(), self.segments)
        if method.pulls:
            self.anchor.weights = self.weights.distribute(outer.weights)
        return outer

    @torch.no_grad()
    def load_merged(
        self, outer: MergedWeights, local: Mapping[str, Tensor], *, pulls: bool
    ) -> None:
        """Write the merged weights into this rank's parts; a collective of the island's ranks.

        Args:
            pulls: the method needs them until the next merge.
        """
        found = self.weights.distribute(outer.weights)
        self.anchor.weights = found if pulls else {}
        for name, merged in found.items():
            local[name].copy_(merged)


@dataclass
class LocalWeights:
    """Merged weights in the parts of a layout, by name."""

    weights: Mapping[str, Tensor]


def require_canonical(found: CanonicalParts | None) -> CanonicalParts:
    """Return the canonical units of islands that come and go.

    Raises:
        BugError: there are none, as the islands' list is fixed.
    """
    if found is None:
        raise BugError("islands: a fixed list of islands has no canonical units")
    return found


def _gather_shapes(parts: Mapping[str, Part], world: World) -> dict[str, tuple[int, ...]]:
    """Return the shape of every whole tensor, the same on every rank."""
    mine = {name: list(shard.global_shape) for name, (_, shard) in parts.items() if shard.slices}
    return {name: tuple(shape) for one in world.gather_json(mine) for name, shape in one.items()}


def _spans(units: Sequence[Unit]) -> dict[str, tuple[int, int]]:
    """Return the range of each flat tensor that consecutive units cover."""
    return {name: (found[0].start, found[-1].stop) for name, found in join_segments(units).items()}


def _choose_senders(
    wholes: Mapping[str, tuple[int, ...]], held: Sequence[Patches]
) -> list[dict[str, list[boxes.Patch]]]:
    """Return the boxes that each rank sends, so that every number is sent once."""
    offers = [
        [
            (name, wholes[name], "float32", patch.box)
            for name, patches in one.items()
            for patch in patches
        ]
        for one in held
    ]
    shares = [set(share) for share in assign_writers(offers).shares]
    return [
        {
            name: [patch for patch in patches if (name, patch.box) in share]
            for name, patches in one.items()
        }
        for one, share in zip(held, shares, strict=True)
    ]


def _find_moves(sources: Patches, targets: Patches) -> list[_Move]:
    """Return the boxes that two ranks share, in an order that both find."""
    found = []
    for name in sorted(sources.keys() & targets.keys()):
        for source in sources[name]:
            for target in targets[name]:
                box = boxes.overlap(source.box, target.box)
                if box is not None:
                    found.append(_Move(name, box, source, target))
    return found


def _count(sides: Sequence[Sequence[_Move]]) -> list[int]:
    """Return the numbers that a rank exchanges with each rank."""
    return [sum(boxes.elements(one.box) for one in moves) for moves in sides]


def _view(flat: Tensor, patch: boxes.Patch, box: Box) -> Tensor:
    """Return the box of a flat part that holds `patch`, as a view."""
    return view_patch(flat, patch)[boxes.index_within(box, patch.box)]


def _patches(slices: Sequence[Box]) -> tuple[boxes.Patch, ...]:
    return tuple(one for one in boxes.merge_boxes(tuple(slices)) if boxes.elements(one.box))


def _list_boxes(shard: Shard) -> list[list[list[int]]]:
    return [[list(span) for span in box] for box in shard.slices]


def _read(found: Sequence[Sequence[Sequence[int]]]) -> tuple[Box, ...]:
    return tuple(tuple((start, stop) for start, stop in box) for box in found)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
