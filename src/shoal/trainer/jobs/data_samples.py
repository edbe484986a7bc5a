"""Samples of a run as its model gets them: the first ones, or those of one step.

The loader is the run's own (`trainer/loaders/run_loaders.py`), for one data rank in place of all:
batch, micro-batch, seed and collate function are the run's, so every joined value is the model's
input. The layout decides only which rank fetches a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from shoal.base.errors import ConfigError
from shoal.base.layouts.layout import Layout
from shoal.base.plans.plan import Plan
from shoal.data.inspection.sample_fields import describe_sample, split_joined
from shoal.data.loading.loader import Loader
from shoal.data.loading.step_samples import StepBatch
from shoal.data.sources import Source
from shoal.fabric import World
from shoal.fabric.rendezvous.process_info import ProcessInfo
from shoal.trainer.loaders.run_loaders import RunLoaders
from shoal.trainer.step.call_contract import split_batch


@dataclass(frozen=True)
class LoadedSample:
    """One sample of a step.

    Attributes:
        position: in the stream of samples.
        index: dataset index; of an iterable the number in the epoch.
        epoch: pass over the data, from 0.
        micro_batch: number of its micro-batch in the step.
        value: (inputs, targets) or a dict, without the dim of samples; None if the collate function
            has none.
    """

    position: int
    index: int
    epoch: int
    micro_batch: int
    value: Any


def open_stream(
    source: Source,
    plan: Plan,
    notices: list[str],
    is_cut_by_user: bool = True,
    state: Mapping[str, Any] | None = None,
) -> Any:
    """Open the run's own loader of training samples, with one data rank.

    Args:
        source: the opened data.
        plan: of the run; its layout is replaced by one process.
        notices: receives the loader's lines.
        is_cut_by_user: the user fixed the micro-batch, which is then the turn of sharded data.
        state: of the run's loader in a checkpoint, whose turn counts; None: no checkpoint.
    """
    given = ("batch", "micro_batch") if is_cut_by_user else ("batch",)
    alone = replace(plan, layout=Layout())
    world = World(ProcessInfo(), torch.device("cpu"), None)
    loaders = RunLoaders(alone, world, notices.append, given=given)
    turn = (state or {}).get("turn")
    if isinstance(turn, int) and turn > 0:
        loaders.turn = turn
    return loaders.open(source.train, 0, source.collate)


def first_batches(loader: Any, samples: int) -> Iterator[StepBatch]:
    """Yield the first steps of a loader, until they hold at least `samples`."""
    if isinstance(loader, Loader):
        yield from loader.over([(0, min(samples, loader.samples))])
        return
    seen = 0
    for batch in iter(loader):
        yield batch
        seen += batch.next_position - batch.position
        if seen >= samples:
            return


def step_batch(
    loader: Any, start: int, stop: int, states: Sequence[Mapping[str, Any]] = ()
) -> StepBatch:
    """Return the step from stream position `start` to `stop`.

    A dataset with an index is read there at once. An iterable is read from the newest state of a
    checkpoint before `start`, or from its beginning.

    Args:
        states: of the run's loader in its checkpoints.

    Raises:
        ConfigError: the data ends before, or has no step there.
    """
    if isinstance(loader, Loader):
        if start // loader.samples != (stop - 1) // loader.samples:
            raise ConfigError(
                f"data.source: samples {start} … {stop - 1} of the stream lie in two epochs of the "
                f"{loader.samples} samples that the data has, so no step had them; try: the data "
                f"as it was"
            )
        return next(loader.over([(start, stop)]))
    before = [
        one for one in states if is_position(one.get("position")) and one["position"] <= start
    ]
    if before:
        with contextlib.suppress(ConfigError):  # no state of its own: read from the beginning
            loader.restore(dict(max(before, key=lambda one: one["position"])))
    while loader.position <= start:
        seen = loader.position
        for batch in iter(loader):
            if batch.position == start:
                return batch
            if batch.position > start:
                break
        if loader.position == seen:
            break
    raise ConfigError(
        f"data.source: no step begins at sample {start} of this stream; its data has changed "
        f"since the run, or another batch size cuts it"
    )


def is_position(value: Any) -> bool:
    """Return whether a value of a checkpoint is a position in a stream."""
    return type(value) is int and value >= 0


def iter_samples(batch: StepBatch) -> Iterator[LoadedSample]:
    """Yield the samples of a step in the order of the stream."""
    for micro_batch, ids in zip(batch.micro_batches, batch.sample_ids, strict=True):
        values = split_joined(micro_batch.value, len(ids))
        for n, (position, index) in enumerate(zip(micro_batch.positions, ids, strict=False)):
            value = values[n] if values is not None else None
            yield LoadedSample(position, int(index), batch.epoch, micro_batch.index, value)


def describe_samples(batch: StepBatch, most: int | None = None) -> list[dict[str, Any]]:
    """Return JSON descriptions of the samples of a step, at most `most`.

    Micro-batches that are not stacked along the samples are described whole, once each.
    """
    rows: list[dict[str, Any]] = []
    for sample in islice(iter_samples(batch), most):
        place = {
            "position": sample.position,
            "sample": sample.index,
            "epoch": sample.epoch,
            "micro_batch": sample.micro_batch,
        }
        if sample.value is None:
            whole = next(m for m in batch.micro_batches if m.index == sample.micro_batch)
            if any(row["micro_batch"] == sample.micro_batch for row in rows):
                continue
            place["whole_micro_batch"] = len(whole.positions)
            rows.append({**place, **describe_sample(*_split(whole.value))})
        else:
            rows.append({**place, **describe_sample(*_split(sample.value))})
    return rows


def _split(value: Any) -> tuple[Any, Any]:
    """Return (inputs, targets); a value that a run would refuse is both."""
    try:
        return split_batch(value)
    except ConfigError:
        return value, value
