"""Bugs that distributed training is known for, planted in a world of processes for the battery.

Each is a context in which the layout's side computes wrongly, as other projects did; the twin is
one process, where nothing is planted. What a bug patches is the one place of ours that does it
right, so the battery is asked about that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import cases
import trajectory
from inside_causes import explained
from shoal.fabric import World
from shoal.parallel.buffers import batch_norm
from shoal.parallel.data_parallel.buckets import BucketReducer
from shoal.parallel.data_parallel.zero import FlatWeights
from shoal.proof import Battery, tensor_spill
from shoal.trainer import parallelize as parallelizing
from shoal.trainer.guards.optimizer_checks import MovementCheck
from shoal.trainer.passes import step_runner as running
from shoal.trainer.step import micro_batch, unreadable_samples
from shoal.trainer.step import optimizer_step as stepping
from shoal.trainer.step.micro_batch import MicroBatch


def prove(
    world: World,
    bug: str,
    case: str,
    precision: str = "fp64",
    steps: int = 5,
    layout: str = "ddp",
    in_files: bool = False,
    by_blocks: bool = False,
) -> dict[str, Any]:
    """The report on a layout with a planted bug; SGD alone, as every step of it is judged.

    in_files, by_blocks  as for large models
    """
    torch.set_num_threads(1)
    battery = trajectory.battery(case, precision, steps, "sgd")
    deep = partial(cases.GPT, layers=4) if by_blocks else cases.GPT
    with BUGS[bug](world), patch.object(cases, "GPT", deep):
        return prove_large(battery, world, layout, in_files, by_blocks)


def prove_large(
    battery: Battery,
    world: World,
    layout: str | dict[str, Any],
    in_files: bool,
    by_blocks: bool,
) -> dict[str, Any]:
    """The report, made as that of a large model is."""
    if in_files:
        battery = replace(battery, twins={})
    battery = replace(battery, by_blocks=by_blocks)
    with patch.object(
        tensor_spill, "IN_MEMORY_BYTES", 0 if in_files else tensor_spill.IN_MEMORY_BYTES
    ):
        return explained(battery, world, layout)


@contextmanager
def nothing(world: World) -> Iterator[None]:
    """No bug: the same battery must then be content."""
    yield


def on_update(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`update` with its tally changed by `change(program, tally)`, on several processes only."""
    right = stepping.update

    def update(program: Any, optimizer: Any, tally: Any, **settings: Any) -> Any:
        if program.world.size > 1:
            tally = change(program, tally)
        return right(program, optimizer, tally, **settings)

    return update


@contextmanager
def mean_of_means(world: World) -> Iterator[None]:
    """Every rank divides by its own count of targets; then the mean over ranks."""
    own = {"count": 0.0}
    added, begun, send = MicroBatch.add_to_sums, BucketReducer.start_step, BucketReducer._send

    def count(self: MicroBatch, total: Any, targets: Any) -> Any:
        own["count"] += 0.0 if self.index == micro_batch.JOINING else float(targets)
        return added(self, total, targets)

    def begin(self: BucketReducer, *rest: Any) -> None:
        own["count"] = 0.0
        begun(self, *rest)

    def divided(self: BucketReducer) -> None:
        if own["count"]:
            self.flats[len(self.pending)] /= own["count"]
        send(self)

    with ExitStack() as stack:
        stack.enter_context(patch.object(MicroBatch, "add_to_sums", count))
        stack.enter_context(patch.object(BucketReducer, "start_step", begin))
        stack.enter_context(patch.object(BucketReducer, "_send", divided))
        by_ranks = on_update(lambda program, tally: replace(tally, count=float(world.size)))
        stack.enter_context(patch.object(running, "update", by_ranks))
        yield


@contextmanager
def factor_lost(world: World) -> Iterator[None]:
    """Gradients are averaged over ranks, as DDP does, and divided by the global count too."""
    averaged = on_update(lambda program, tally: replace(tally, count=tally.count * world.size))
    with patch.object(running, "update", averaged):
        yield


@contextmanager
def short_window(world: World) -> Iterator[None]:
    """The last, short window of an epoch is divided by the micro-batches of a full one."""
    full = {"micro_batches": 0}

    def stretch(program: Any, tally: Any) -> Any:
        ran = tally.micro_batches
        full["micro_batches"] = max(full["micro_batches"], ran)
        return replace(tally, count=tally.count * full["micro_batches"] / ran)

    with patch.object(running, "update", on_update(stretch)):
        yield


@contextmanager
def sync_each(world: World) -> Iterator[None]:
    """Gradients are summed over ranks after every micro-batch, not only after the last."""
    now: dict[str, Any] = {"reducer": None, "ran": 0}
    begun, called, ended = BucketReducer.start_step, micro_batch.call_model, BucketReducer.finish

    def finish(self: BucketReducer) -> None:
        ended(self)
        now["reducer"] = None

    def begin(self: BucketReducer, *rest: Any) -> None:
        begun(self, *rest)
        now["reducer"], now["ran"] = (self if self.worlds[0].size > 1 else None), 0

    def call(*arguments: Any) -> Any:
        if now["ran"] and now["reducer"] is not None:
            for flat in now["reducer"].flats:
                world.all_reduce(flat)
        now["ran"] += 1
        return called(*arguments)

    with (
        patch.object(BucketReducer, "start_step", begin),
        patch.object(BucketReducer, "finish", finish),
        patch.object(micro_batch, "call_model", call),
    ):
        yield


def finished(change: Callable[[BucketReducer], None]) -> Any:
    """`BucketReducer.finish` with something done to the sums afterwards."""
    finish = BucketReducer.finish

    def wrongly(self: BucketReducer) -> None:
        finish(self)
        change(self)

    return patch.object(BucketReducer, "finish", wrongly)


@contextmanager
def tie_twice(world: World) -> Iterator[None]:
    """The tied embedding is summed under both of its names."""

    def double(reducer: BucketReducer) -> None:
        for name, view in reducer.views.items():
            if name in ("tokens.weight", "embedding.weight"):
                view.mul_(2)

    with finished(double):
        yield


@contextmanager
def local_norm(world: World) -> Iterator[None]:
    """Every rank takes the norm of the part that it would own, and clips by that."""

    def local(program: Any, tally: Any) -> Any:
        parts = [s.flatten()[world.rank :: world.size] for s in program.reducer.sums()]
        return replace(tally, norm=float(stepping.sum_of_squares(parts)) ** 0.5)

    with patch.object(running, "update", on_update(local)):
        yield


@contextmanager
def norm_of_a_half(world: World) -> Iterator[None]:
    """All ranks take the norm of the same part: nobody drifts, everybody clips too little."""

    def half(program: Any, tally: Any) -> Any:
        parts = [s.flatten()[: s.numel() // 2] for s in program.reducer.sums()]
        return replace(tally, norm=float(stepping.sum_of_squares(parts)) ** 0.5)

    with patch.object(running, "update", on_update(half)):
        yield


@contextmanager
def frozen_updated(world: World) -> Iterator[None]:
    """Weight decay reaches a parameter that is frozen."""
    right = stepping.update

    def update(program: Any, *rest: Any, **settings: Any) -> Any:
        done = right(program, *rest, **settings)
        if program.world.size > 1:
            for parameter in program.frozen.values():
                parameter.data.mul_(0.999)
        return done

    with patch.object(running, "update", update):
        yield


@contextmanager
def optimizer_first(world: World) -> Iterator[None]:
    """The optimizer was built over the weights before they were sharded: it steps over copies.

    The guard that finds this at the first step is put aside: the battery must find it too.
    """
    right = parallelizing.shard_param_groups

    def hand_over(optimizer: Any, originals: Any, program: Any) -> None:
        right(optimizer, originals, program)
        if program.world.size > 1:
            copies = [p.detach().clone().requires_grad_() for p in program.parameters.values()]
            optimizer.step = torch.optim.SGD(copies, lr=0.1).step

    with (
        patch.object(parallelizing, "shard_param_groups", hand_over),
        patch.object(MovementCheck, "moved", lambda self: None),
    ):
        yield


@contextmanager
def bf16_sums(world: World) -> Iterator[None]:
    """Gradients are accumulated in bf16."""
    now: dict[str, Any] = {"reducer": None}
    begun, called = BucketReducer.start_step, micro_batch.call_model

    def begin(self: BucketReducer, *rest: Any) -> None:
        begun(self, *rest)
        now["reducer"] = self if self.worlds[0].size > 1 else None

    def call(*arguments: Any) -> Any:
        for flat in now["reducer"].flats if now["reducer"] is not None else ():
            flat.copy_(flat.bfloat16())
        return called(*arguments)

    with (
        patch.object(BucketReducer, "start_step", begin),
        patch.object(micro_batch, "call_model", call),
    ):
        yield


@contextmanager
def batch_norm_drift(world: World) -> Iterator[None]:
    """Every rank moves its running statistics by its own micro-batches."""
    right = batch_norm._StatisticsCollector.commit

    def commit(self: Any, _uneven: bool) -> None:
        shared, self.world = self.world, Alone(self.world)
        try:
            right(self, uneven=False)
        finally:
            self.world = shared

    with patch.object(batch_norm._StatisticsCollector, "commit", commit):
        yield


class Alone:
    """A world whose gather brings only what was given."""

    def __init__(self, world: World) -> None:
        self.device = world.device

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One row: this rank's."""
        return tensor.unsqueeze(0)


@contextmanager
def one_rank_skips(world: World) -> Iterator[None]:
    """The last rank believes that a step overflowed, and decides for itself to skip it.

    The second one that nobody skips: fp16's first steps overflow everywhere until its scale fits.
    """
    steps = {"taken": 0}

    def doubt(program: Any, tally: Any) -> Any:
        steps["taken"] += not tally.broken
        doubts = steps["taken"] == 2 and not tally.broken
        alone = doubts and world.rank == world.size - 1
        if not alone:
            return tally
        return replace(tally, broken=True, broken_ranks=lambda: [world.rank])

    with (
        patch.object(running, "update", on_update(doubt)),
        patch.object(
            unreadable_samples, "report_skip", lambda *rest, **more: None
        ),  # where all ranks would meet
    ):
        yield


@contextmanager
def dropped_from_bucket(world: World) -> Iterator[None]:
    """The last parameter of the last bucket never travels: every rank keeps its own gradient."""
    own: dict[str, torch.Tensor] = {}
    send = BucketReducer._send

    def keep(self: BucketReducer) -> None:
        if len(self.pending) == len(self.flats) - 1:
            name = self.plan[-1].names[-1]
            own[name] = self.views[name].clone()
        send(self)

    def restore(reducer: BucketReducer) -> None:
        for name, gradient in own.items():
            reducer.views[name].copy_(gradient)

    with patch.object(BucketReducer, "_send", keep), finished(restore):
        yield


@contextmanager
def stale_shard(world: World) -> Iterator[None]:
    """The weights that other ranks stepped are never fetched."""
    with patch.object(FlatWeights, "publish", lambda self: None):
        yield


BUGS = {
    "nothing": nothing,
    "mean of means": mean_of_means,
    "factor lost": factor_lost,
    "short window": short_window,
    "sync each": sync_each,
    "tie twice": tie_twice,
    "local norm": local_norm,
    "norm of a half": norm_of_a_half,
    "frozen updated": frozen_updated,
    "optimizer first": optimizer_first,
    "bf16 sums": bf16_sums,
    "batch norm drift": batch_norm_drift,
    "one rank skips": one_rank_skips,
    "dropped from bucket": dropped_from_bucket,
    "stale shard": stale_shard,
}
