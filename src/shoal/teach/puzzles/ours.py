"""Shoal's programs for the puzzles: three families with switches, and the submitted settings.

Unlike the author's programs, they free tensors at their last use (the last activation right after
the loss, an activation and the gathered weight before the gradient travels). They update a layer as
soon as its gradient is whole and free that gradient, add gradients up at once, run pipelines 1f1b
from the planner's own action lists, and update during waits. The search tries the other settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.base.plans.pipeline_actions import Action
from shoal.planning.pipeline_schedules import make_schedule
from shoal.teach.puzzles.model import PuzzleRank


@dataclass(frozen=True)
class DataParallelProgram:
    """Data-parallel program of puzzles 0 to 4, with switches.

    Attributes:
        parts: sizes into which a rank's batches are cut, one after the other.
        sharded: "" nothing, "weights", or "all" (gradients too).
        soon: update each layer right after its last backward, not at the end.
        early: free tensors at their last use.
        keep: number of last layers that stay gathered from forward to backward.
    """

    parts: tuple[int, ...] = (1,)
    sharded: str = ""
    soon: bool = True
    early: bool = True
    keep: int = 0

    async def __call__(self, m: PuzzleRank) -> None:
        """Run the program."""
        for layer in range(m.layers):
            m.load(layer, None, *((m.rank, m.ranks) if self.sharded else (0, 1)))
        first = m.rank * sum(self.parts) if m.ranks > 1 else 0
        for number, size in enumerate(self.parts):
            m.input(range(first, first + size), 0)
            first += size
            await self._forward(m)
            await self._backward(m, number)
        for layer in [] if self.soon else range(m.layers):
            await self._reduce_and_update(m, layer)

    async def _forward(self, m: PuzzleRank) -> None:
        for layer in range(m.layers):
            await self._gather(m, layer)
            m.forward(layer, layer, layer + 1, self._weight_key(layer))
            if self.sharded and layer < m.layers - self.keep:
                m.free("weights", self._weight_key(layer))
        m.loss(m.layers, m.layers)
        if self.early:
            m.free("activations", m.layers)

    async def _backward(self, m: PuzzleRank, number: int) -> None:
        last = number == len(self.parts) - 1
        for layer in reversed(range(m.layers)):
            await self._gather(m, layer)
            made = (layer, "more") if number else layer
            m.backward(layer, layer, layer + 1, layer, made, self._weight_key(layer))
            if number:
                m.add(layer, made)
                m.free("weight_grads", made)
            m.free("activations", layer)
            m.free("grads", layer + 1)
            if layer == 0 and self.early:
                m.free("grads", 0)
            if self.sharded:
                m.free("weights", self._weight_key(layer))
            if last and self.sharded == "all":
                await m.reduce_scatter(layer)
            if last and self.soon:
                await self._reduce_and_update(m, layer)

    def _weight_key(self, layer: int) -> object:
        return ("whole", layer) if self.sharded else layer

    async def _gather(self, m: PuzzleRank, layer: int) -> None:
        if self.sharded and self._weight_key(layer) not in m.stores["weights"]:
            await m.all_gather(layer, self._weight_key(layer))

    async def _reduce_and_update(self, m: PuzzleRank, layer: int) -> None:
        if m.ranks > 1 and self.sharded != "all":
            await m.all_reduce(layer)
        m.update(layer, layer, layer)
        if self.early:
            m.free("weight_grads", layer)


@dataclass(frozen=True)
class PipelineProgram:
    """Pipeline program of puzzles 5 and 6, with switches.

    Attributes:
        parts: sizes of the micro-batches, which run 1f1b.
        at_once: add gradients up as they come, not at the end.
        early: free tensors at their last use.
        ahead: by rank: forwards that it runs ahead beyond 1f1b (all of them: gpipe); () none.
            Shoal's programs use the fewest with which no message reaches a rank that still waits
            for another, so that one mailbox per rank is enough.
    """

    parts: tuple[int, ...]
    at_once: bool = True
    early: bool = True
    ahead: tuple[int, ...] = ()

    async def __call__(self, m: PuzzleRank) -> None:
        """Run the program."""
        each = m.layers // m.ranks
        layers = range(m.rank * each, (m.rank + 1) * each)
        for layer in layers:
            m.load(layer)
        schedule = make_schedule("1f1b", m.ranks, len(self.parts))
        for act in _shift_forwards(schedule.ranks[m.rank], self.ahead[m.rank] if self.ahead else 0):
            if act.kind == "F":
                await self._forward(m, layers, act.micro_batch)
            else:
                await self._backward(m, layers, act.micro_batch)
        for layer in reversed(layers):
            for j in range(1, len(self.parts)):
                if not self.at_once:
                    m.add((layer, 0), (layer, j))
                    m.free("weight_grads", (layer, j))
            m.update(layer, (layer, 0), layer)
            if self.early:
                m.free("weight_grads", (layer, 0))

    async def _forward(self, m: PuzzleRank, layers: range, j: int) -> None:
        end = layers.stop
        if m.rank == 0:
            start = sum(self.parts[:j])
            m.input(range(start, start + self.parts[j]), (0, j))
        else:
            await m.receive(m.rank - 1, (layers[0], j))
        for layer in layers:
            m.forward(layer, (layer, j), (layer + 1, j), layer)
        if m.rank < m.ranks - 1:
            await m.send(m.rank + 1, "activations", (end, j))
            if self.early:
                m.free("activations", (end, j))

    async def _backward(self, m: PuzzleRank, layers: range, j: int) -> None:
        end = layers.stop
        if m.rank == m.ranks - 1:
            m.loss((end, j), (end, j))
            if self.early:
                m.free("activations", (end, j))
        else:
            await m.receive(m.rank + 1, (end, j))
        for layer in reversed(layers):
            m.backward(layer, (layer, j), (layer + 1, j), (layer, j), (layer, j), layer)
            m.free("grads", (layer + 1, j))
            m.free("activations", (layer, j))
            if self.at_once and (layer, 0) in m.stores["weight_grads"] and j:
                m.add((layer, 0), (layer, j))
                m.free("weight_grads", (layer, j))
        if m.rank:
            await m.send(m.rank - 1, "grads", (layers[0], j))
        if self.early:
            m.free("grads", (layers[0], j))


def _shift_forwards(acts: Sequence[Action], more: int) -> list[Action]:
    """Return the list with every forward `more` backwards earlier."""
    order = list(acts)
    for _ in range(more):
        for at in range(1, len(order)):
            if order[at].kind == "F" and order[at - 1].kind == "B":
                order[at - 1], order[at] = order[at], order[at - 1]
    return order


@dataclass(frozen=True)
class ShardedPipelineProgram:
    """Program of puzzle 7: pipelines side by side, weights sharded over all ranks.

    Attributes:
        waits: update a layer while this rank would wait anyway, not at the end.
        early: free tensors at their last use.
        keep: number of last stages that keep their gathered weight from forward to backward.
    """

    stages: int = 4
    waits: bool = True
    early: bool = True
    keep: int = 1

    async def __call__(self, m: PuzzleRank) -> None:
        """Run the program."""
        place = m.rank % self.stages
        for layer in range(m.layers):
            m.load(layer, ("part", layer), m.rank, m.ranks)
        await self._forward(m, place)
        late = await self._backward(m, place)
        for layer in late:
            self._update(m, layer)

    async def _forward(self, m: PuzzleRank, place: int) -> None:
        last = m.layers - 1
        for layer in range(m.layers):
            if layer == place and place:
                await m.receive(m.rank - 1, layer)
            elif layer == place:
                m.input([m.rank // self.stages], 0)
            await m.all_gather(("part", layer), layer)
            if layer == place:
                m.forward(layer, layer, layer + 1, layer)
            if layer != place or layer < m.layers - self.keep:
                m.free("weights", layer)
            if layer == place < last:
                await m.send(m.rank + 1, "activations", layer + 1)
                if self.early:
                    m.free("activations", layer + 1)
        if place == last:
            m.loss(m.layers, m.layers)
            if self.early:
                m.free("activations", m.layers)

    async def _backward(self, m: PuzzleRank, place: int) -> list[int]:
        """Run the backward; return the layers that still need their update."""
        last = m.layers - 1
        late: list[int] = []
        for layer in reversed(range(m.layers)):
            if layer == place < last:
                while self.waits and late and place == 0:
                    # The first stage's only remaining wait: while the second one sends.
                    self._update(m, late.pop(0))
                await m.receive(m.rank + 1, layer + 1)
            if layer < m.layers - self.keep:
                await m.all_gather(("part", layer), layer)
            if layer == place:
                m.backward(layer, layer, layer + 1, layer, layer, layer)
                m.free("grads", layer + 1)
                m.free("activations", layer)
                self._free_weight(m, layer, self.early)
            else:
                self._free_weight(m, layer, self.early)
                while self.waits and late:
                    self._update(m, late.pop(0))
                m.empty(layer, layer)
            await m.reduce_scatter(layer)
            self._free_weight(m, layer, True)
            late.append(layer)
            if layer == place:
                await self._hand_back(m, layer)
        return late

    def _free_weight(self, m: PuzzleRank, layer: int, now: bool) -> None:
        """Free the gathered weight, if it is still there."""
        if now and layer in m.stores["weights"]:
            m.free("weights", layer)

    async def _hand_back(self, m: PuzzleRank, layer: int) -> None:
        if layer > 0:
            await m.send(m.rank - 1, "grads", layer)
        if self.early:
            m.free("grads", layer)

    def _update(self, m: PuzzleRank, layer: int) -> None:
        m.update(layer, layer, ("part", layer))
        m.free("weight_grads", layer)


standard = DataParallelProgram(parts=(4,))
accumulate = DataParallelProgram(parts=(1, 1, 1, 1))
ddp = DataParallelProgram()
weight_sharded = DataParallelProgram(sharded="weights")
fsdp = DataParallelProgram(sharded="all", keep=1)
pipeline = PipelineProgram(parts=(4,))
one_f_one_b = PipelineProgram(parts=(1, 1, 1, 1), ahead=(0, 1, 2, 2))
pipeline_fsdp = ShardedPipelineProgram()
