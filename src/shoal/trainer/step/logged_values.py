"""Sums and counts by name of metrics and loss parts, summed over ranks like the loss.

    metrics        functions (outputs, targets) → (sum, count) or unreduced values
    parts          third of what a loss returns: (sum, count, {"ce": ce_sum, "kl": (kl_sum, n)});
                   a sum without a count of its own is over the count of the loss
    `run.log`      in loops written out, values that no function of outputs and targets returns

Sums and counts are part of the step's single all-reduce. A rank that never sees a name does not
know it (a stage of a pipeline has no outputs). So in the first step with a new name, ranks agree on
names, and sum the new values in a separate all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.parallel.program import Program
from shoal.trainer.step.call_contract import Metric, split_named_parts, sum_and_count

TAKEN = ("loss", "targets")
"""Names that results have already."""


def check_metrics(metrics: Mapping[str, Metric], where: str) -> None:
    """Raise ConfigError for a metric that is not callable, or that has a reserved name."""
    for name, function in metrics.items():
        if not callable(function):
            raise ConfigError(
                f"{where}: metrics[{name!r}] is {type(function).__name__}, a function (outputs, "
                f"targets) → (sum, count) is wanted"
            )
        _check_name(name, f"{where}: metrics hold")


def _check_name(name: Any, holds: str) -> None:
    if name in TAKEN:
        raise ConfigError(
            f"{holds} the name {name}, which the result has already; try: {name}_metric"
        )
    if not isinstance(name, str):
        raise ConfigError(f"{holds} the name {name!r}, a string is wanted; try: {str(name)!r}")


class LoggedValues:
    """Sums and counts by name of one step on this rank, before the sum over all ranks.

    Attributes:
        names: those that all ranks know, in one order.
    """

    def __init__(self, program: Program, metrics: Mapping[str, Metric]) -> None:
        self.program, self.metrics = program, metrics
        self.names: list[str] = []
        self._here: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, result: Any, outputs: Any, targets: Any) -> None:
        """Add the named parts of a micro-batch's loss, and the metrics of its outputs."""
        plain, parts = split_named_parts(result)
        if parts:
            _, count = sum_and_count(plain, targets)
            for name, part in parts.items():
                self.add_value(
                    name, *(part if isinstance(part, tuple) else (part, count)), where="loss"
                )
        for name, function in self.metrics.items():
            found = function(outputs, targets)
            if not (isinstance(found, tuple) and len(found) == 2):
                found = sum_and_count(found, targets, name)
            self.add_value(name, *found, where="metrics")

    @torch.no_grad()
    def add_value(self, name: str, total: Any, count: Any, *, where: str) -> None:
        """Add a sum and its count under a name.

        Raises:
            ConfigError: one of them is neither a number nor a scalar tensor, or the name is
                reserved.
        """
        _check_name(name, f"{where}: holds")
        device = self.program.world.device
        pair = []
        for word, value in (("sum", total), ("count", count)):
            if isinstance(value, torch.Tensor) and not value.dim():
                pair.append(value.detach().to(device, torch.float64))
            elif isinstance(value, int | float):
                pair.append(torch.full((), float(value), dtype=torch.float64, device=device))
            else:
                shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
                raise ConfigError(
                    f"{where}: the {word} of {name} must be a number or a tensor without dims, got "
                    f"{type(value).__name__}{shape}"
                )
        held = self._here.get(name)
        both = torch.stack(pair)
        self._here[name] = both if held is None else held + both

    @property
    def has_new_names(self) -> bool:
        """Return whether this rank has names that the others may not know."""
        return any(name not in self.names for name in self._here)

    def to_vector(self) -> torch.Tensor:
        """Return sums and counts of the names that all ranks know, float64, [2 × names]."""
        return self._vector(self.names)

    def values(self, told: Sequence[float], unknown: bool) -> dict[str, float]:
        """Return the means over all ranks, and reset the sums; every rank calls it.

        Args:
            told: `told`, summed over ranks.
            unknown: some rank has names that others may not know.
        """
        world = self.program.world
        if unknown:
            fresh = [name for name in self._here if name not in self.names]
            gathered = [name for names in world.gather_json(fresh) for name in names]
            fresh = list(dict.fromkeys(gathered))
            vector = self._vector(fresh)
            world.all_reduce(vector)
            self.names += fresh
            told = [*told, *vector.tolist()]
        self._here.clear()
        sums, counts = told[::2], told[1::2]
        return {
            name: total / count if count else math.nan
            for name, total, count in zip(self.names, sums, counts, strict=True)
        }

    def _vector(self, names: list[str]) -> torch.Tensor:
        nothing = torch.zeros(2, dtype=torch.float64, device=self.program.world.device)
        rows = [self._here.get(name, nothing) for name in names]
        return (torch.cat(rows) if rows else nothing[:0]) * self.program.speaks
