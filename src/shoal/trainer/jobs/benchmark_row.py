"""One row of `shoal compare`, measured on every process: a few real steps under one layout.

The row's run is the main job's run (same model, data, order, micro-batches, optimizer, schedule)
without validation, checkpoints and files. Its steps: a few for warm-up, which are dropped; the
timed ones; and six under a profiler for temporary memory, never timed. Many rows share a process,
one after another. Each frees everything but its figures, except `single`, which writes its weights
to a file with which the other rows compare theirs.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shoal.base.errors import UserError
from shoal.base.runlog.damaged_lines import replace_non_finite
from shoal.config.resolve import make_plan
from shoal.config.sections import Config
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.fabric.device import empty_cache
from shoal.machine.states import count_state_bytes, measure_peak_bytes
from shoal.parallel.build.full_state import gather_weights
from shoal.trainer.jobs.configured_run import count_total_steps, open_run
from shoal.trainer.jobs.run_forecast import (
    collect_model_facts,
    describe_local_cluster,
    forecast_run,
)
from shoal.trainer.run import Run
from shoal.wire.phases import iter_with_progress, phase

WARMUP_STEPS = 2
REFERENCE = "single.safetensors"
"""File in the comparison's folder with the weights of `single` after the compared steps."""

Row = dict[str, Any]


def open_row(config: Config, source: Source, world: World, layout: str | Mapping[str, int]) -> Run:
    """Return a run of the main job under `layout`, which writes nothing.

    Raises:
        PlanError, ConfigError: the same on all ranks, if this layout cannot train this model.
    """
    total_steps = count_total_steps(config, source, config.train.batch)
    return open_run(config, source, world, make_plan(config), layout, total_steps=total_steps)


def measure_row(
    config: Config,
    source: Source,
    world: World,
    layout: str | Mapping[str, int],
    *,
    steps: int,
    compared: int,
    folder: Path,
) -> Row:
    """Train a fresh model under `layout` for a few steps; call it on every rank.

    Args:
        steps: timed, after 2 for warm-up.
        compared: weights are compared after so many steps, counted from the first and at most all
            of these, timed ones included.
        folder: where `single` writes its weights (REFERENCE): run it first, others compare theirs.

    Returns:
        Figures as JSON values, equal on every rank but for `predicted`; {"reason": …} alone if the
        layout cannot train this model. Keys: predicted (rank 0 alone: the planner's forecast of the
        row); text, precision, parameters (of the run); per_s (targets, that is tokens, or samples
        per second of the median step, all ranks); step_s (of each timed step); losses (of every
        step from the first); sent_bytes (by kind, in one step, of the busiest rank); memory (per
        rank, bytes of weights, gradients, optimizer and rest; rest may be None); weight_difference
        (from `single`; None if unknown).

    Raises:
        Exception: whatever a step raises; the world is then unusable for further rows.
    """
    try:
        run = open_row(config, source, world, layout)
    except UserError as failure:
        return {"reason": str(failure)}
    # No `finally`: after a failure on one rank, the teardown of a run would be one more collective.
    figures = _measure_figures(run, source, (steps, compared), config.data.workers, folder)
    if world.is_first:
        facts = partial(collect_model_facts, config, source)
        figures["predicted"] = forecast_run(
            config,
            facts,
            run.plan,
            describe_local_cluster(world.size, world.device),
            run.program.travel,
        )
    _tear_down_run(run)
    del run
    gc.collect()
    empty_cache()
    return figures


def _measure_figures(
    run: Run, source: Source, counts: tuple[int, int], workers: int, folder: Path
) -> Row:
    batches = _repeat_loader(run.loader(source.train, workers=workers, collate=source.collate))
    rows: list[Row] = []
    run.recorder.events.listeners.append(rows.append)
    steps, compared = counts
    difference = None
    run.recorder.restart_clock()
    total = WARMUP_STEPS + steps
    for step in iter_with_progress("steps", total, range(1, total + 1)):
        run.step(next(batches))
        if step == min(compared, total):  # between two steps, so it is not timed
            difference = _compare_weights(run, folder / REFERENCE)
            run.recorder.restart_clock()
    told = [row for row in rows if row["event"] == "step"]
    timed = told[WARMUP_STEPS:]
    states = count_state_bytes(run)
    rest_bytes = _rest_bytes(run, batches)
    memory = run.world.gather_json({**asdict(states), "rest": rest_bytes})
    # Of a full step: the short last one of an epoch may send less.
    fullest = max((row["comm_bytes_by_kind"] for row in timed), key=lambda k: sum(k.values()))
    sent = run.world.gather_json(fullest)
    figures = {
        "text": run.plan.layout.text(),
        "precision": run.plan.compute,
        "parameters": run.plan.parameters,
        "per_s": statistics.median(_compute_throughput(row, source.kind) for row in timed),
        "step_s": [row["step_s"] for row in timed],
        "losses": [replace_non_finite(row["loss"]) for row in told],
        "sent_bytes": max(sent, key=lambda kinds: sum(kinds.values())),
        "memory": memory,
        "weight_difference": difference,
    }
    return run.world.broadcast_json(figures)


@phase("memory")
def _rest_bytes(run: Run, batches: Iterator[StepBatch]) -> int | None:
    """Return the peak bytes of a step beyond the states; None under `dp` on a CPU (threads)."""
    if run.plan.layout.threads > 1 and run.world.device.type == "cpu":
        return None
    return measure_peak_bytes(lambda: run.step(next(batches)), run.world.device)


def _tear_down_run(run: Run) -> None:
    """Remove the row's hooks and tensors; the world stays open, unlike after `run.close`."""
    for undo in run.program.on_close:
        undo()
    run.recorder.events.listeners.clear()
    run.optimizer.state.clear()
    for parameter in run.model.parameters():
        parameter.grad = None


def _repeat_loader(loader: Iterable[StepBatch]) -> Iterator[StepBatch]:
    """Yield batches epoch after epoch."""
    while True:
        yield from loader


def _compute_throughput(row: Row, kind: str) -> float:
    """Return the throughput per second: targets if samples are tokens, else samples."""
    begin, end = row["samples"]
    count = row["tokens"] if kind == "tokens" else end - begin
    return float(count / row["step_s"])


def _compare_weights(run: Run, reference: Path) -> float | None:
    """Return the distance of this run's weights from those of `single`, by the norm of the latter.

    `single` itself writes its weights. Rank 0 of the other rows returns a number; None if unknown.
    """
    weights = gather_weights(run.program, only_first=True)
    if run.plan.layout.strategy == "single":
        save_file(weights, reference)
        return 0.0
    if not run.world.is_first or not reference.exists():
        return None
    return relative_difference(weights, load_file(reference))


def relative_difference(
    here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]
) -> float | None:
    """Return the norm of all differences by the norm of all of `there`, in float64; None for inf.

    >>> one, two = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 5.0])}
    >>> relative_difference(two, one)
    0.2
    """
    apart = whole = 0.0
    for name, tensor in there.items():
        theirs = tensor.double()
        apart += float((here[name].double() - theirs).square().sum())
        whole += float(theirs.square().sum())
    return replace_non_finite(math.sqrt(apart / whole) if whole else math.sqrt(apart))
