"""Notices before a save: state that the checkpoint will not have as the run has it.

    buffers       that differ between ranks which hold the same part: one rank's value is kept
    a scheduler   of torch that sets the optimizer's rate, and that no `extra` saves

Both are legal: a queue of each rank's own, a schedule that is set anew by hand. So they are one
line, once in a run.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.data.loading.dataset_kind import digest_of
from shoal.parallel.program import Program
from shoal.trainer.metrics_recorder import MetricsRecorder


class SavedRun(Protocol):
    """The attributes of a run that a save compares."""

    program: Program
    optimizer: torch.optim.Optimizer
    recorder: MetricsRecorder
    extra_record: dict[str, Any]


_looked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runs whose schedulers were looked for."""
_named: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runs whose unlike buffers were named."""


def print_save_notices(run: SavedRun) -> None:
    """Print what the next checkpoint will lack; every rank calls it.

    Args:
        run: the run.
    """
    if run.program.plan.guards == "off":
        return
    if run not in _looked:
        _looked.add(run)
        if line := scheduler_line(run.optimizer, run.extra_record.get("extra")):
            run.recorder.notice(line)
    if run not in _named and (line := buffer_line(run.program)):
        _named.add(run)
        if run.program.replicas.is_first and run.program.tensor.rank == 0:
            run.recorder.emit_rank_notice(line)


def buffer_line(program: Program) -> str:
    """Return the notice on a buffer that differs between ranks with the same part of the model.

    Args:
        program: the run's; all ranks call it.
    """
    world = program.replicas
    kept = {
        name: buffer
        for name, buffer in program.module.named_buffers()
        if name in program.rows and not buffer.is_meta
    }
    if world.size == 1 or not kept:
        return ""
    unlike = world.find_differing_rank({name: digest_of(one) for name, one in kept.items()})
    if unlike is None:
        return ""
    rank, first, other = unlike
    names = [name for name in first if other.get(name) != first[name]]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"run.save: buffer {names[0]}{more} is another on rank {world.ranks[rank]} than on rank "
        f"{world.ranks[0]}, as after forward passes in training mode on some ranks alone, and the "
        f"checkpoint keeps one of them; try: such passes on every rank, or model.eval() around "
        f"them; if each rank keeps a queue of its own, all is well"
    )


def scheduler_line(optimizer: torch.optim.Optimizer, extra: Any) -> str:
    """Return the notice on a scheduler of torch that has begun and that no save keeps.

    Args:
        optimizer: the run's.
        extra: what `run.save` keeps beside the run, as JSON.
    """
    if "last_epoch" in str(extra):  # a state of a scheduler is kept
        return ""
    for one in _list_scheduling_objects(optimizer):
        kinds = (LRScheduler, ReduceLROnPlateau)
        if issubclass(type(one), kinds) and getattr(one, "optimizer", None) is optimizer:
            return (
                f"run.save: {type(one).__name__} sets the optimizer's rate, and no checkpoint has "
                f"its state, so a restored run begins the schedule anew; try: run.save(extra="
                f'{{"schedule": scheduler}}) and scheduler.load_state_dict(run.extra["schedule"])'
            )
    return ""


def _list_scheduling_objects(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the objects that refer to an optimizer, a scheduler's among them.

    The garbage collector searches in C. A loop over all objects takes three times as long.
    """
    found: list[Any] = []
    for one in gc.get_referrers(optimizer):
        if type(one) is not dict:  # an object whose attributes Python keeps in itself
            found.append(one)
        elif "last_epoch" in one:
            found += gc.get_referrers(one)
    return found
