"""Quick proof of a run in the user's own loop, at its first batch: `parallelize(…, prove="auto")`.

    first batch     two small steps in float64, under the layout and in one process, as before
                    `shoal train` (start_proof.py); a proven difference ends the run
    samples         of the dataset of the run's loader, spread over it, so that samples which take
                    other branches of the model are among them; else those of all ranks' first
                    batches
    the loss        the run's. A loop over `run.micro_batches` has its own: the outputs are
                    multiplied by fixed numbers instead

`trainer/first_batch_proof.py` copies the model and the loss, and calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from shoal.base.errors import ConfigError, ShoalError, TrainingError
from shoal.data.loading.dataset_kind import join_samples as join_samples_of_dataset
from shoal.data.loading.sample_seeds import preserved_rng
from shoal.data.loading.step_samples import StepBatch
from shoal.fabric.device import empty_cache, is_accelerator
from shoal.machine.free_memory import free_device_bytes
from shoal.machine.process_memory import peak_memory_bytes, reset_peak_memory
from shoal.planning.settle import layout_keys
from shoal.proof.diagnosis.clue import SCRIPT
from shoal.proof.proof_case import ProofCase
from shoal.proof.reference_limits import STATES
from shoal.proof.start_proof import prove_case
from shoal.trainer.batches.batch_split import read_columns, split_into_micro_batches
from shoal.trainer.batches.batch_values import has_objects
from shoal.trainer.first_batch_proof import (
    MEMORY_SHARE,
    select_dataset,
    weigh_outputs,
)
from shoal.trainer.process.watchdog_client import pause_comparison
from shoal.trainer.run import Run
from shoal.trainer.step.borrowed_batch import broadcast_spare_batch
from shoal.trainer.step.call_contract import Loss
from shoal.wire.phases import phase

SAMPLES = 8
"""Samples of each rank's first batch that a proof reads."""


@phase("proof")
def prove_first_batch(
    run: Run, batch: Any, build: Callable[[], nn.Module], loss: Loss, key: str = ""
) -> str:
    """Prove a run on its first batch; return the line for the user. Every rank calls it.

    Args:
        run: the run, before its first step.
        batch: of that step.
        build: returns a copy of the model as it was before the layout cut it.
        loss: of the proof, which refers to the model that `build` returned last.
        key: on rank 0, under which "equal" is kept; "": found here.

    Raises:
        TrainingError: the layout does not compute what one process computes.
    """
    world, log_runs, peak_bytes = run.world, run.meeting.runs, peak_memory_bytes(run.world.device)
    line = ""
    try:
        with preserved_rng(), pause_comparison(world):
            refuse_device_shortage(run)
            data, collate = list_samples(run, batch)
            if loss is weigh_outputs:
                collate = partial(join_as_pair, collate)
            layout = layout_keys(run.plan.layout)
            case = ProofCase(build, loss, data, collate, layout, run.plan, spread=True)
            off = 'shoal.parallelize(…, prove="off")'
            alone, folder = f"shoal prove {SCRIPT}", run.recorder.folder
            line = prove_case(case, world, folder, alone=alone, off=off, key=key)
    except TrainingError:
        raise
    except ShoalError as failure:  # the same on all ranks
        line = f"proof: not proven: {failure}; training goes on"
    finally:
        run.meeting.runs = log_runs  # the user closes no run of the proof
    if line:
        empty_cache()
        if peak_memory_bytes(world.device) > peak_bytes:
            reset_peak_memory(world.device)  # the proof's memory is not the run's
    return line


def join_as_pair(collate: Any, samples: list[Any]) -> Any:
    """Join samples; what is no pair is both inputs and targets, as for `run.micro_batches`."""
    batch = join_samples_of_dataset(samples, collate, "the samples of a proof")
    is_pair = isinstance(batch, tuple | list) and len(batch) == 2
    return batch if is_pair or isinstance(batch, Mapping) else (batch, batch)


def refuse_device_shortage(run: Run) -> None:
    """Raise ConfigError, on all ranks, if a rank's accelerator lacks memory for one process more.

    The run is on the device already, and a rank that runs out of memory would leave the others
    waiting.
    """
    device, shortage = run.world.device, ""
    if not is_accelerator(device):
        return
    needed, free = STATES * run.plan.parameters * 8, free_device_bytes(device)
    if needed > MEMORY_SHARE * free:
        shortage = (
            f"memory: one process in float64 takes {needed / 2**30:.1f} GiB, and a quarter of "
            f"the free memory of {device} is {MEMORY_SHARE * free / 2**30:.1f} GiB"
        )
    if found := [one for one in run.world.gather_json(shortage) if one]:
        raise ConfigError(found[0])


def list_samples(run: Run, batch: Any) -> tuple[Any, Any]:
    """Return (dataset, collate) of a proof: the run's loader's, or the samples of first batches.

    A batch that the loop has changed, or that a stream gave, is not read from the dataset again.

    Raises:
        ConfigError: the batch cannot be cut into samples; on all ranks.
    """
    if (known := select_dataset(run, batch)) is not None:
        return known
    world, data = run.world, run.program.data
    own, failure = None, ""
    try:
        own = _first_samples(batch)
        if own is not None and has_objects(own):
            failure = "batch: its samples are in an object, which is not sent to other ranks"
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
            columns = read_columns(part)
            found.append([columns.cut(n, n + 1) for n in range(columns.samples)])
    # One sample of each rank in turn, so that branches that depend on the rank's data differ.
    most = max(map(len, found))
    return [part[n] for n in range(most) for part in found if n < len(part)], columns.join


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
