"""Quick proof of a run in the user's own loop, at its first batch: `parallelize(…, prove="auto")`.

    first batch     two small steps in float64, under the layout and in one process, as before
                    `shoal train` (start_proof.py); a proven difference ends the run
    samples         of the run's own loader; else the samples of all ranks' first batches
    the loss        the run's. A loop over `run.micro_batches` has its own: the outputs are
                    multiplied by fixed numbers instead

`trainer/first_batch_proof.py` copies the model and the loss, and calls this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.base.errors import ConfigError, ShoalError, TrainingError
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.planning.settle import layout_keys
from shoal.proof.proof_case import ProofCase
from shoal.proof.start_proof import prove_case
from shoal.trace._torch import pytree
from shoal.trainer.process.watchdog_client import pause_comparison
from shoal.trainer.run import Run
from shoal.trainer.step.borrowed_batch import broadcast_spare_batch
from shoal.trainer.step.call_contract import Loss, split_into_micro_batches
from shoal.wire.phases import phase

SAMPLES = 8
"""Samples of each rank's first batch that a proof reads."""


@phase("proof")
def prove_first_batch(
    run: Run, batch: Any, build: Callable[[], nn.Module], loss: Loss | None
) -> str:
    """Prove a run on its first batch; return the line for the user. Every rank calls it.

    Args:
        run: the run, before its first step.
        batch: of that step.
        build: returns a copy of the model as it was before the layout cut it.
        loss: the run's, which refers to the model that `build` returned last; None: the loop has
            its own.

    Raises:
        TrainingError: the layout does not compute what one process computes.
    """
    world, log_runs = run.world, run.meeting.runs
    try:
        with preserved_rng(), pause_comparison(world):
            data, collate = list_samples(run, batch)
            layout = layout_keys(run.plan.layout)
            case = ProofCase(build, loss or weigh_outputs, data, collate, layout, run.plan)
            off = 'shoal.parallelize(…, prove="off")'
            alone = "shoal prove -- SCRIPT"
            return prove_case(case, world, run.recorder.folder, alone=alone, off=off)
    except TrainingError:
        raise
    except ShoalError as failure:  # the same on all ranks
        return f"proof: not proven: {failure}; training goes on"
    finally:
        run.meeting.runs = log_runs  # the user closes no run of the proof


def list_samples(run: Run, batch: Any) -> tuple[Any, Any]:
    """Return (dataset, collate) of a proof: the run's loader's, or the samples of first batches.

    Raises:
        ConfigError: the batch cannot be cut into samples; on all ranks.
    """
    if run.feed.settings:
        dataset, _, collate = run.feed.settings[0]
        return dataset, collate
    world, data = run.world, run.program.data
    own, failure = None, ""
    try:
        own = _first_samples(batch)
    except ConfigError as error:
        failure = str(error)
    told = world.gather_json([data.rank, own is not None, failure])
    if failures := [one for _, _, one in told if one]:
        raise ConfigError(failures[0])  # on all ranks: one alone would leave the others waiting
    found: list[list[Any]] = []
    for number in range(data.size):
        sources = [rank for rank, (at, has, _) in enumerate(told) if at == number and has]
        if sources:  # else the ranks of this number have no sample in the first step
            part = broadcast_spare_batch(world, own if sources[0] == world.rank else None)
            found.append(list(split_into_micro_batches(part, 1)))
    # One sample of each rank in turn, so that branches that depend on the rank's data differ.
    most = max(map(len, found))
    return [part[n] for n in range(most) for part in found if n < len(part)], join_samples


def _first_samples(batch: Any) -> Any:
    """Return at most `SAMPLES` of this rank's samples, joined; None without samples.

    Raises:
        ConfigError: the batch cannot be cut into samples.
    """
    if isinstance(batch, StepBatch):  # of another run's loader
        if not batch.values:
            return None
        batch = batch.values[0]
    return next(iter(split_into_micro_batches(batch, SAMPLES)), None)


def join_samples(samples: list[Any]) -> Any:
    """Join samples, which are batches of one, along dim 0."""
    trees = [pytree.tree_flatten(one) for one in samples]
    columns = zip(*(leaves for leaves, _ in trees), strict=True)
    joined = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) and column[0].ndim else column[0]
        for column in map(list, columns)
    ]
    return pytree.tree_unflatten(joined, trees[0][1])


def weigh_outputs(outputs: Any, _targets: Any) -> tuple[torch.Tensor, int]:
    """Return a sum over all outputs, each times a fixed number between −1 and 1."""
    total: torch.Tensor | None = None
    samples = 1
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            numbers = torch.arange(leaf[:1].numel(), device=leaf.device, dtype=leaf.dtype)
            part = (leaf * torch.sin(numbers + 1).reshape(leaf[:1].shape)).sum()
            total = part if total is None else total + part
            samples = max(samples, len(leaf))
    if total is None:
        raise ConfigError("the model's outputs have no gradient")
    return total, samples
