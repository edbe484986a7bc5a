"""Validation: sums and counts over every sample once, in every layout.

Each rank runs its micro-batches; sums and counts are added over ranks and divided once. Nothing is
padded and no sample is counted twice, so the value does not depend on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shoal.base.errors import ConfigError
from shoal.fabric.device import copy_numbers_to_device
from shoal.parallel.program import Program
from shoal.trainer.guards import layout_guards
from shoal.trainer.guards.guard import Guards
from shoal.trainer.step.call_contract import Loss, Metric, sum_and_count
from shoal.trainer.step.logged_values import LoggedValues, check_metrics
from shoal.trainer.step.micro_batch import MicroBatch
from shoal.trainer.step.step_vector import StepVector
from shoal.wire.phases import iter_with_progress

if TYPE_CHECKING:  # only mixtures have several sources
    from shoal.trainer.passes.source_losses import SourceLoss

NONE, MORE, STOP = 0, 1, 2
"""Messages of a rank before each of its micro-batches; the largest value of all ranks applies."""


class _StoppedError(Exception):
    """Signal, raised on all ranks, that a stop was requested before the end."""


@torch.no_grad()
def evaluate(
    program: Program,
    batches: Iterable[Any],
    loss: Loss,
    metrics: Mapping[str, Metric],
    call: str,
    *,
    stop: Callable[[], bool] | None = None,
    by_source: dict[str, SourceLoss] | None = None,
) -> dict[str, float]:
    """Return means over all samples of all ranks.

    Args:
        program: the run's.
        batches: this rank's micro-batches, pairs or dicts; ranks may hold different numbers.
        loss: the run's loss.
        metrics: name → function(outputs, targets) giving (sum, count) or unreduced values.
        call: as `call_model`.
        stop: called before every micro-batch; if it returns True on any rank, all ranks stop.
        by_source: filled with the loss of each source if the batches are of a mixture.

    Returns:
        `loss`, one value per name, and `targets`, the denominator of the loss; {} after a stop.

    Raises:
        ConfigError: a loss or metric returns a mean, or a metric has a reserved name.
    """
    check_metrics(metrics, "run.evaluate")
    measured = LoggedValues(program, metrics)
    totals = torch.zeros(2, dtype=torch.float64, device=program.world.device)
    sources = None
    if by_source is not None and getattr(batches, "source_names", None):
        from shoal.trainer.passes.source_losses import SourceLosses  # of mixtures only

        sources = SourceLosses(program, loss, batches, metrics)
    most = getattr(batches, "most", 0)
    with evaluation_mode(program) as stopped:
        for batch, counted in iter_with_progress(
            "validation", most, _iterate_batches(program, batches, stop)
        ):
            one = MicroBatch(program, loss, 0, 0, batch, call, 1.0, totals)
            outputs = program.forward(program, one)
            if outputs is None:
                continue  # another stage has them
            targets = one.parts[1]
            with program.autocast():
                result = loss(outputs, targets)
                total, count = sum_and_count(result, targets)
                if counted:
                    measured.add(result, outputs, targets)
            if counted:
                both = torch.stack([total.double(), count.to(totals)]) * program.speaks
                totals += both
                if sources is not None:
                    sources.add(outputs, targets, both)
    if stopped:
        return {}
    vector = StepVector()
    vector.add("loss_and_count", [0.0, 0.0])
    guards = Guards(layout_guards(program))  # ranks that ran different blocks have different losses
    invariants = guards.invariants(0)
    vector.add_invariants(invariants, 0, program.world)
    if invariants:
        totals = torch.cat((totals, copy_numbers_to_device(totals.device, vector.values[2:])))
    program.world.all_reduce(totals)
    numbers = vector.name_sums(totals.tolist(), invariants, program.world)
    for guard in guards.at("agree", 0):
        guard.agree(0, numbers)
    loss_sum, targets = numbers.sums("loss_and_count")
    if sources is not None and by_source is not None:
        by_source |= sources.all_reduce()
    values = measured.values([], program.world.size > 1 or measured.has_new_names)
    return {"loss": loss_sum / targets if targets else math.nan, **values, "targets": targets}


def _iterate_batches(
    program: Program, batches: Iterable[Any], stop: Callable[[], bool] | None
) -> Iterator[tuple[Any, bool]]:
    """Yield (batch, whether it counts); if parameters are gathered, all ranks yield equally often.

    Raises:
        ConfigError: some rank has no micro-batch to run with the others; on all ranks.
    """
    gathers = program.together and program.data.size > 1
    if stop is None and not gathers:
        yield from ((batch, True) for batch in batches)
        return
    group = program.data if stop is None else program.world
    own, batch = iter(batches), None
    while True:
        following = next(own, None)
        batch = batch if following is None else following
        word = MORE if following is not None else NONE
        word = group.all_reduce_max(STOP if stop is not None and stop() else word)
        if word == STOP:
            raise _StoppedError
        if word == NONE:
            return
        if gathers and not program.data.all_true(batch is not None):
            raise ConfigError(
                f"run.evaluate: fewer micro-batches than ranks, and layout "
                f"{program.plan.layout.strategy} runs the model on all ranks at once; try: "
                f"more validation samples, or a smaller micro_batch"
            )
        if gathers or following is not None:
            yield batch, following is not None


@contextmanager
def evaluation_mode(program: Program) -> Iterator[list[bool]]:
    """Switch to evaluation mode inside; restore the mode of every submodule afterwards.

    Returns:
        A list that is not empty after a stop.
    """
    training = [m for m in program.module.modules() if m.training]
    program.module.eval()
    stopped: list[bool] = []
    for begin in program.on_evaluate:
        begin()
    try:
        yield stopped
    except _StoppedError:
        stopped.append(True)
    finally:
        for done in program.on_evaluated:
            done()
        for part in training:
            part.training = True
