"""Validation: sums and counts over every sample once, whatever the layout.

Each rank runs its micro-batches; sums and counts are added over ranks and divided once. Nothing is
padded and no sample is counted twice, so the value does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.parallel.program import Program
from shoal.trainer.contract import Loss, sum_and_count
from shoal.trainer.micro_batch import MicroBatch

Metric = Callable[[Any, Any], Any]


@torch.no_grad()
def evaluate(
    program: Program,
    batches: Iterable[Any],
    loss: Loss,
    metrics: Mapping[str, Metric],
    *,
    call: str,
) -> dict[str, float]:
    """Means over all samples of all ranks.

    batches   this rank's micro-batches, pairs or dicts; ranks may hold different numbers
    metrics   name → function(outputs, targets) giving (sum, count) or unreduced values
    Gives     `loss`, one value per metric, and `targets`, the count that the loss was divided by
    Errors    ConfigError for a loss or metric that returns a mean, or a metric of a taken name
    """
    for name in ("loss", "targets"):
        if name in metrics:
            raise ConfigError(
                f"run.evaluate: metrics hold the name {name}, which the result has already; "
                f"nearest: {name}_metric"
            )
    functions = {"loss": loss, **metrics}
    totals = torch.zeros(2, len(functions), dtype=torch.float64, device=program.world.device)
    with _evaluating(program):
        for batch, counted in _passes(program, batches):
            one = MicroBatch(program, loss, 0, 0, batch, call, 1.0, totals)
            outputs = program.forward(program, one)
            if outputs is None:
                continue  # another stage has them
            targets = one.parts[1]
            for column, (name, function) in enumerate(functions.items()):
                with program.autocast():
                    total, count = sum_and_count(function(outputs, targets), targets, name)
                if counted and program.speaks:
                    totals[0, column] += total
                    totals[1, column] += count
    program.world.sum(totals)
    sums, counts = totals.tolist()
    values = {
        name: total / count if count else float("nan")
        for name, total, count in zip(functions, sums, counts, strict=True)
    }
    return {**values, "targets": counts[0]}


def _passes(program: Program, batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """(batch, whether it counts); where parameters are gathered, all ranks pass equally often.

    Errors: ConfigError on all ranks where one has nothing at all to run with the others.
    """
    if not program.together or program.data.size == 1:
        yield from ((batch, True) for batch in batches)
        return
    own, batch = iter(batches), None
    while True:
        following = next(own, None)
        batch = batch if following is None else following
        if not program.data.largest(int(following is not None)):
            return
        if not program.data.all_true(batch is not None):
            raise ConfigError(
                f"run.evaluate: fewer micro-batches than ranks, and layout "
                f"{program.plan.layout.strategy} runs the model on all ranks at once; nearest: "
                f"more validation samples, or a smaller micro_batch"
            )
        yield batch, following is not None


@contextmanager
def _evaluating(program: Program) -> Iterator[None]:
    """Evaluation mode inside, then every submodule's own mode again: some may be kept in it."""
    training = [m for m in program.module.modules() if m.training]
    program.module.eval()
    try:
        yield
    finally:
        for done in program.on_evaluated:
            done()
        for part in training:
            part.training = True
