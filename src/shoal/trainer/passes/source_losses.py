"""Loss by source of a mixture, or by data owner, in a validation.

The held-out samples of a mixture lie source by source, so most micro-batches are of one source and
cost nothing more. In a micro-batch of several, the loss is computed again on the samples of each
source but the last, which gets the rest: sums over sources equal the sums of the whole. Order of
samples, micro-batches and the loss of the whole stay as they are. The metrics that a dataset names
in `source_metrics` are divided in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.parallel.program import Program
from shoal.trainer._torch import pytree
from shoal.trainer.step.call_contract import Loss, Metric, sum_and_count
from shoal.trainer.step.optimizer_step import as_count

SourceLoss = dict[str, float | None]
"""{"loss": mean over the targets of a source, None without any, "targets": their number}, and each
metric by its name."""


class MixtureBatches(Protocol):
    """Micro-batches of a mixture, which know the sources of the last one."""

    source_names: tuple[str, ...]
    batches: Any  # a loader, whose dataset may have `source_metrics`

    def sources(self) -> list[str]:
        """Return the source of each sample of the micro-batch that was yielded last."""


class SourceLosses:
    """Sums of loss, targets and metrics by source on this rank, until they are summed over ranks.

    Args:
        metrics: of the validation; those that the dataset names in `source_metrics` are used.
    """

    def __init__(
        self, program: Program, loss: Loss, batches: Any, metrics: Mapping[str, Metric]
    ) -> None:
        self.program, self.loss = program, loss
        self.batches: MixtureBatches = batches
        self.names = self.batches.source_names
        dataset = getattr(self.batches.batches, "dataset", None)
        wanted = getattr(dataset, "source_metrics", ())
        self.metrics = {name: metrics[name] for name in wanted if name in metrics}
        device, columns = program.world.device, 2 + 2 * len(self.metrics)
        self.sums = torch.zeros(len(self.names), columns, dtype=torch.float64, device=device)
        self.is_complete = True

    def add(self, outputs: Any, targets: Any, both: Tensor) -> None:
        """Add a micro-batch's loss sum and targets to those of its sources.

        Args:
            outputs, targets: of the micro-batch.
            both: its loss sum and count, [2] float64.
        """
        rows_of: dict[str, list[int]] = {}
        for row, name in enumerate(sources := self.batches.sources()):
            rows_of.setdefault(name, []).append(row)
        *others, last = rows_of or [""]
        rest = torch.cat([both, *self._sum_metrics(outputs, targets)])
        if others and not _have_rows(targets, len(sources)):
            self.is_complete = False  # its samples do not lie along dim 0
            return
        for name in others:
            part = self._sum_rows(outputs, targets, rows_of[name], len(sources))
            self.sums[self.names.index(name)] += part
            rest = rest - part
        if last:
            self.sums[self.names.index(last)] += rest

    def all_reduce(self) -> dict[str, SourceLoss]:
        """Return the losses over all ranks; {} if some micro-batch could not be divided."""
        world = self.program.world
        lacking = self.sums.new_tensor([float(not self.is_complete)])
        told = torch.cat((self.sums.flatten(), lacking))
        world.all_reduce(told)
        if told[-1]:
            return {}
        found: dict[str, SourceLoss] = {}
        for name, row in zip(self.names, told[:-1].view_as(self.sums).tolist(), strict=True):
            total, count, *further = row
            found[name] = {"loss": total / count if count else None, "targets": as_count(count)}
            pairs = zip(self.metrics, further[::2], further[1::2], strict=True)
            found[name] |= {metric: s / n for metric, s, n in pairs if n}
        return found

    def _sum_rows(self, outputs: Any, targets: Any, rows: list[int], count: int) -> Tensor:
        """Return sums and counts of some samples of a micro-batch of `count`."""
        own = [_select_rows(tree, rows, count) for tree in (outputs, targets)]
        with self.program.autocast():
            total, targets_count = sum_and_count(self.loss(*own), own[1])
        both = torch.stack([total.double(), targets_count.to(self.sums)])
        return torch.cat([both * self.program.speaks, *self._sum_metrics(*own)])

    def _sum_metrics(self, outputs: Any, targets: Any) -> list[Tensor]:
        """Return sum and count of each metric, [2] float64."""
        found = []
        with self.program.autocast():
            for metric in self.metrics.values():
                total, count = sum_and_count(metric(outputs, targets), targets)
                both = torch.stack([total.double(), count.to(self.sums)])
                found.append(both * self.program.speaks)
        return found


def _have_rows(tree: Any, count: int) -> bool:
    """Return whether all tensors of a tree have one row for each of `count` samples."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(t.dim() > 0 and len(t) == count for t in tensors)


def _select_rows(tree: Any, rows: list[int], count: int) -> Any:
    """Return a tree whose tensors with a row for each sample have the given rows alone."""

    def select(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count):
            return leaf
        return leaf.index_select(0, torch.tensor(rows, device=leaf.device))

    return pytree.tree_map(select, tree)
