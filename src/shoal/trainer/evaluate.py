"""Validation: sums and counts over every sample once, whatever the layout.

Each rank runs its micro-batches; sums and counts are added over ranks and divided once. Nothing is
padded and no sample is counted twice, so the value does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shoal.parallel.program import Program
from shoal.trainer.contract import Loss, call_model, split_batch, sum_and_count

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
    """
    names = ["loss", *metrics]
    functions = [loss, *metrics.values()]
    totals = torch.zeros(2, len(names), dtype=torch.float64, device=program.world.device)
    was_training = program.module.training
    program.module.eval()
    try:
        for batch in batches:
            for prepare in program.prepare:
                batch = prepare(batch)
            inputs, targets = split_batch(batch)
            with program.autocast():
                outputs = call_model(program.module, inputs, call)
                for column, function in enumerate(functions):
                    total, count = sum_and_count(function(outputs, targets), targets)
                    totals[0, column] += total
                    totals[1, column] += count
    finally:
        program.module.train(was_training)
    program.world.sum(totals)
    sums, counts = totals.tolist()
    values = {
        name: total / count if count else float("nan")
        for name, total, count in zip(names, sums, counts, strict=True)
    }
    return {**values, "targets": counts[0]}
