"""BatchNorm under any layout: statistics per micro-batch, running buffers updated once per step.

A running buffer is a linear recurrence r ← (1 − m)·r + m·x over the micro-batches in order. While a
micro-batch runs, its BatchNorm layers write into scratch buffers that start at 0: after k calls
these hold s with r_after = (1 − m)^k · r + s. All ranks then gather every (s, k) and apply them in
the order of the micro-batches. So running buffers are equal on all ranks, and equal to those of one
process. With momentum None (a plain average) the mean of all calls is kept instead.
Layers in evaluation mode (frozen statistics, usual in fine-tuning) read their buffers and change
nothing. Layers that take their statistics over all ranks (sync_batch_norm.py) have the same row on
every rank that ran the pass: those of the rank with the most passes are applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from shoal.base.errors import BugError
from shoal.fabric import World
from shoal.parallel._torch import BatchNorm
from shoal.parallel.buffers.sync_batch_norm import joins_ranks
from shoal.parallel.program import Program


def apply(program: Program) -> Program:
    """Keep the running statistics of every BatchNorm equal on all ranks."""
    layers = [
        m
        for m in program.module.modules()
        if isinstance(m, BatchNorm) and m.running_mean is not None and not m.running_mean.is_meta
    ]
    if not layers:
        return program
    rule = _StatisticsCollector(layers, program.replicas)
    return replace(
        program,
        on_begin=(*program.on_begin, rule.start_step),
        around=(*program.around, rule.micro_batch),
        on_update=(*program.on_update, rule.commit),
    )


def release(program: Program) -> Program:
    """Return the program without this rule: each rank's passes move its own running statistics."""

    def is_other(hook: Any) -> bool:
        return not isinstance(getattr(hook, "__self__", None), _StatisticsCollector)

    return replace(
        program,
        on_begin=tuple(filter(is_other, program.on_begin)),
        around=tuple(filter(is_other, program.around)),
        on_update=tuple(filter(is_other, program.on_update)),
    )


def _running_statistics(layer: BatchNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a layer's (running mean, running variance, number of batches tracked)."""
    kept = (layer.running_mean, layer.running_var, layer.num_batches_tracked)
    mean, variance, calls = kept
    if mean is None or variance is None or calls is None:
        raise BugError("a BatchNorm without running statistics came under the rule")
    return mean, variance, calls


class _StatisticsCollector:
    """Collector of the BatchNorm statistics of a step's micro-batches, applied at its end."""

    def __init__(self, layers: list[BatchNorm], world: World) -> None:
        self.layers = layers
        self.world = world
        self.seen: dict[int, dict[int, torch.Tensor]] = {}

    def __deepcopy__(self, known: dict[int, Any]) -> _StatisticsCollector:
        """Copy the collector for a replica's layers; the copy writes into the same record."""
        twin = _StatisticsCollector(
            [known.get(id(layer), layer) for layer in self.layers], self.world
        )
        twin.seen = self.seen
        return twin

    def start_step(self) -> None:
        """Clear the statistics of a step that was skipped, or that failed half-way."""
        self.seen.clear()

    @contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        kept = [(layer, _running_statistics(layer)) for layer in self.layers if layer.training]
        for layer, buffers in kept:
            _set_running_buffers(layer, *(torch.zeros_like(buffer) for buffer in buffers))
        try:
            yield
            if index < 0:
                return  # a pass that only joins the collectives of other ranks
            self._record_statistics(index, {layer for layer, _ in kept})
        finally:
            for layer, buffers in kept:
                _set_running_buffers(layer, *buffers)

    def _record_statistics(self, index: int, moved: set[BatchNorm]) -> None:
        """Record [k, mean, variance] of every layer that ran in this micro-batch, as float64.

        A pipeline returns to a micro-batch: for its next stage, whose layers ran now, and for its
        backward pass, where recomputation may run a recorded layer once more.
        """
        known = self.seen.setdefault(index, {})
        for number, layer in enumerate(self.layers):
            mean, variance, calls = _running_statistics(layer)
            # A layer outside of `moved` has its real buffers, which also hold earlier steps.
            if layer in moved and calls and number not in known:
                parts = [calls.double().reshape(1), mean.double(), variance.double()]
                known[number] = torch.cat(parts)

    def _pack_row(self, index: int) -> torch.Tensor:
        """Return [index, then k, mean, variance of each layer], zeros if a layer did not run."""
        known = self.seen[index]
        parts = [torch.tensor([index], dtype=torch.float64, device=self.world.device)]
        for number, layer in enumerate(self.layers):
            width = 1 + 2 * _running_statistics(layer)[0].numel()
            told = known.get(number)
            parts.append(parts[0].new_zeros(width) if told is None else told.to(self.world.device))
        return torch.cat(parts)

    @torch.no_grad()
    def commit(self, uneven: bool) -> None:
        """All-gather the step's statistics and update the running buffers alike on all ranks.

        Args:
            uneven: ranks ran unequal numbers of micro-batches, so they first agree on the largest.
        """
        width = 1 + sum(1 + 2 * _running_statistics(layer)[0].numel() for layer in self.layers)
        most = self.world.all_reduce_max(len(self.seen)) if uneven else len(self.seen)
        mine = torch.full((most, width), -1.0, dtype=torch.float64)
        mine = mine.to(self.world.device)
        for place, index in enumerate(self.seen):
            mine[place] = self._pack_row(index)
        everyone = self.world.all_gather(mine)  # [ranks, most, width]
        busiest = int((everyone[:, :, 0] >= 0).sum(1).argmax()) if most else 0
        rows = [(rank, row) for rank, own in enumerate(everyone) for row in own if row[0] >= 0]
        for rank, row in sorted(rows, key=lambda one: float(one[1][0])):
            self._apply_row(row, synced=rank == busiest)
        self.seen.clear()

    def _apply_row(self, row: torch.Tensor, *, synced: bool) -> None:
        """Update running statistics by a micro-batch; `synced`: also in SyncBatchNorm layers."""
        place = 1
        for layer in self.layers:
            mean, variance, tracked = _running_statistics(layer)
            if not synced and joins_ranks(layer):
                place += 1 + 2 * mean.numel()
                continue
            calls, before = int(row[place]), int(tracked)
            place += 1
            for buffer in (mean, variance):
                told = row[place : place + buffer.numel()].to(buffer.dtype)
                place += buffer.numel()
                if calls == 0:
                    continue
                if layer.momentum is None:
                    buffer.mul_(before / (before + calls)).add_(
                        told, alpha=calls / (before + calls)
                    )
                else:
                    buffer.mul_((1 - layer.momentum) ** calls).add_(told)
            tracked += calls


def _set_running_buffers(
    layer: BatchNorm, mean: torch.Tensor, variance: torch.Tensor, calls: torch.Tensor
) -> None:
    layer.running_mean, layer.running_var, layer.num_batches_tracked = mean, variance, calls
