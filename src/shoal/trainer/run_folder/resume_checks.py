"""Comparison of a resumed run with the run that wrote its checkpoint.

A checkpoint stores what is compared: settings, versions, the user's own source, and digests of some
samples. `shoal train --resume` stops at a difference that changes the result. A user's own loop,
whose arguments may change on purpose, prints a warning.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.batches import default_turn
from shoal.base.runlog.environment import find_user_code, library_versions
from shoal.checkpoint.format.listing import list_checkpoints, read_manifest
from shoal.config.differences import (
    Difference,
    compare_configurations,
    compare_environments,
    format_refusal,
)
from shoal.data.loading.dataset_kind import dataset_identity, digest_of, is_indexed
from shoal.data.loading.sample_seeds import seeded_rng
from shoal.fabric import World
from shoal.optim.named_state import to_json_value
from shoal.parallel.program import Program
from shoal.trainer.guards.optimizer_checks import LearningRateSetter
from shoal.trainer.metrics_recorder import MetricsRecorder

STRICT = "SHOAL_RESUME"
"""Environment variable of `shoal train`: with `strict` a difference stops a resume."""
LOOKS, LOOK_S, LOOK_AT_MOST_S = 16, 0.1, 5.0
"""Samples to digest, seconds for them, and seconds to wait for the process that reads them."""
CHOSEN = "micro_batch_chosen"
"""Key of a checkpoint's record: Shoal chose the micro-batch, so it follows the layout."""
GOLDEN = 0.6180339887498949
"""A stride of this share of a range spreads the first indices evenly, wherever the walk stops."""


class ComparedLoaders(Protocol):
    """The methods of a run's loaders (`run_loaders.py`) that compare their data."""

    def sample_digests(self, place: int) -> list[str]:
        """Return digests of some samples of a loader's dataset."""

    def compare_dataset(self, place: int, kept: dict[str, Any]) -> Difference | None:
        """Return how a loader's dataset differs from the dataset of a saved state."""


class ComparedRun(Protocol):
    """The attributes of a run (`run.py`) that a resume compares."""

    program: Program
    optimizer: torch.optim.Optimizer
    rate: LearningRateSetter
    recorder: MetricsRecorder
    extra_record: dict[str, Any]
    step_count: int

    @property
    def feed(self) -> ComparedLoaders:
        """The loaders of the run."""


def collect_run_facts(run: ComparedRun) -> dict[str, Any]:
    """Return the facts that a checkpoint stores for comparison: versions, source and settings.

    They are collected at the start, when the source on disk is the source that runs. `settings` are
    those of `parallelize`; a run of `shoal train` stores its run.toml in their place.
    """
    plan, schedule = run.program.plan, run.rate.length.schedule
    settings: dict[str, Any] = {"clip": plan.clip, "average": plan.average, "call": plan.call}
    settings |= {key: getattr(plan, key) for key in ("reduce", "compress")}
    if schedule is not None:
        told = {**asdict(schedule), "total_steps": run.rate.length.total_steps}
        settings |= {f"schedule.{key}": to_json_value(value) for key, value in told.items()}
    else:
        for number, group in enumerate(run.optimizer.param_groups):
            settings[f"optimizer group {number}: lr as given"] = to_json_value(group["lr"])
    told = {"versions": library_versions(), "code": find_user_code(), "settings": settings}
    return {**told, "layers": describe_classes(run.program.module)}


def describe_classes(module: nn.Module) -> dict[str, str]:
    """Return the class of each layer by name, as every layout has it."""
    kinds = {name: type(part).__name__ for name, part in module.named_modules() if name}
    return {name: kind.removeprefix("FSDP") for name, kind in kinds.items()}  # of fully_shard


def read_saved_micro_batch(folder: Path, world: World) -> int:
    """Return the micro-batch that an earlier start of a run chose; 0 if Shoal chose none.

    Args:
        folder: of the run; its newest checkpoint holds the size.
        world: all ranks; rank 0 reads.
    """
    size = 0
    if world.is_first:
        for found in list_checkpoints(folder / "checkpoints"):
            try:
                record = read_manifest(found.path).record
            except CheckpointError:
                continue  # the restore reports what is wrong with it
            size, batch = int(record.get("micro_batch", 0)), int(record.get("batch", 1))
            # Records before 0.2 do not say who chose; the default was an eighth of the batch.
            size = size if record.get(CHOSEN, size == default_turn(batch)) else 0
            break
    return int(world.broadcast_json(size))


def compare_with_checkpoint(run: ComparedRun, record: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Compare this run with the record of a checkpoint before it is loaded; all ranks call it.

    Returns:
        Lines for the user, and whether any difference changes the result.

    Raises:
        ConfigError: the same on all ranks, if `shoal train` must not resume by itself.
    """
    said: list[Any] = [[], "", False]
    if run.program.world.is_first:
        found = _list_differences(run, record)
        strict = os.environ.get(STRICT) == "strict" and os.environ.get("SHOAL_ATTEMPT", "0") == "0"
        if strict and "configuration" in run.extra_record:
            said[1] = format_refusal(f"--resume {run.recorder.folder}", int(record["step"]), found)
        said[0] = [one.line for one in found]
        said[2] = any(one.changes for one in found)
    lines, stop, changes = run.program.world.broadcast_json(said)
    if stop:
        raise ConfigError(stop)
    return list(lines), bool(changes)


@contextlib.contextmanager
def explain_config_changes(run: ComparedRun, record: Mapping[str, Any]) -> Iterator[None]:
    """Add the changed configuration keys to the error of a checkpoint that cannot be loaded.

    Raises:
        CheckpointError, ConfigError: the block raised one; the message names the changed keys.
    """
    try:
        yield
    except (CheckpointError, ConfigError) as failure:
        then, now = record.get("configuration"), run.extra_record.get("configuration")
        if type(failure) not in (CheckpointError, ConfigError) or not (then and now):
            raise
        changed = [one.line for one in compare_configurations(str(then), str(now)) if one.changes]
        if not changed:
            raise
        said = str(failure).partition("; try: ")[0]
        raise type(failure)(
            f"{said}; changed since step {record.get('step')}: {'; '.join(changed)}; try: put that "
            f"back, or start a new run with another run.name"
        ) from failure


def report_resume(
    run: ComparedRun, path: Path, found: list[str], changes: bool, *, here: bool
) -> None:
    """Report from which checkpoint a run resumes, and what differs.

    A run that returns to a checkpoint meets the differences of its start again: they are reported
    once.

    Args:
        found, changes: the results of `compare_with_checkpoint`.
        here: the run continues in its own folder; False: the checkpoint of a tag, maybe only to
            look at it.
    """
    if run.program.world.writes_files:
        told = {"differs": found, "changes_result": changes}
        run.recorder.events.emit("resumed", step=run.step_count, folder=str(path), **told)
    news = [line for line in found if line not in run.recorder.reported_differences]
    if news and here:
        run.recorder.reported_differences.update(news)
        run.recorder.warn(f"different from step {run.step_count}: {'; '.join(news)}")


def _list_differences(run: ComparedRun, record: Mapping[str, Any]) -> list[Difference]:
    own, plan = run.extra_record, run.program.plan
    then, now = record.get("configuration"), own.get("configuration")
    found = []
    if isinstance(then, str) and isinstance(now, str):
        found += compare_configurations(then, now)
    known = {one.key.rpartition(".")[2] for one in found}
    known |= {"precision"} if "compute" in known else set()
    told = {"layout": plan.layout.text(), "batch": plan.batch, "micro_batch": plan.micro_batch}
    told |= {"precision": plan.compute, "seed": plan.seed}
    for key, value in told.items():
        if key in record and record[key] != value and key not in known:
            follows = key == "layout" or (
                key == "micro_batch" and bool(record.get(CHOSEN)) and bool(own.get(CHOSEN))
            )
            found.append(Difference(key, record[key], value, changes=not follows))
    settings = record.get("settings")
    if now is None and isinstance(settings, dict):
        for key, value in own.get("settings", {}).items():
            if key in settings and settings[key] != value:
                found.append(Difference(key, settings[key], value))
    found += compare_environments(record, own.get("code", {}))
    layers, here = record.get("layers"), own.get("layers", {})
    if isinstance(layers, dict):
        unlike = [name for name in layers if here.get(name, layers[name]) != layers[name]]
        found += [Difference(f"layer {name}", layers[name], here[name]) for name in unlike[:1]]
    for place, kept in enumerate(record["data"]):
        if line := run.feed.compare_dataset(place, kept):
            found.append(line)
    return found


def digest_samples(dataset: Any, workers: int) -> list[str]:
    """Return digests of a few samples, spread over a dataset; [] without an index, or if it raises.

    The draws of samples use fixed seeds, and the random generators keep their states.

    Args:
        dataset: any dataset.
        workers: processes that read it for the run, as in `read_in_fork`.
    """
    return read_in_fork(_digest_spread_samples, dataset, workers) if is_indexed(dataset) else []


def held_out_line(data: Any, workers: int, world: World) -> str:
    """Return the notice on a held-out dataset that differs between ranks; all ranks call it.

    Args:
        data: the dataset of this rank.
        workers: as in `read_in_fork`.
        world: all ranks.
    """
    own = read_in_fork(lambda one: dataset_identity(one) or [], data, workers)
    unlike = world.find_differing_rank(own)
    if unlike is None or not all(unlike[1:]):
        return ""
    return (
        f"run.evaluate: the dataset of rank {unlike[0]} holds other samples than that of rank 0, "
        f"and each rank reads a share of its own, so the mean is of neither; try: the same split "
        f"on every rank (random_split(…, generator=torch.Generator().manual_seed(0))), or batches "
        f"of a rank's own samples"
    )


def read_in_fork(
    read: Callable[[Any], list[Any]], dataset: Any, workers: int, at_most_s: float = LOOK_AT_MOST_S
) -> list[Any]:
    """Return the JSON list of `read(dataset)`, run in a fork if the loader uses workers.

    Args:
        read: reads some samples.
        dataset: read in this process, if there are no workers.
        workers: processes that read the dataset for the run. Above 0 a forked process reads it here
            too, since a dataset may open its files at the first read, and workers must find them
            closed.
        at_most_s: seconds to wait for that process.

    Returns:
        []: no process can be forked, or `read` failed or took longer than `at_most_s`.
    """
    if not workers:
        return read(dataset)
    if not hasattr(os, "fork"):
        return []
    receiving, sending = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)  # a fork has no threads of the parent
            with open(sending, "wb") as pipe:
                pipe.write(json.dumps(read(dataset)).encode())
        finally:
            os._exit(0)
    os.close(sending)
    until_s, told = time.monotonic() + at_most_s, b""
    try:
        while select.select([receiving], [], [], max(0.0, until_s - time.monotonic()))[0]:
            if not (more := os.read(receiving, 2**16)):
                return list(json.loads(told)) if told else []
            told += more
    finally:
        os.close(receiving)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return []


def spread_indices(count: int, most: int) -> Iterator[int]:
    """Yield up to `most` distinct indices below `count`, spread evenly wherever the loop stops.

    >>> list(spread_indices(10, 4))
    [0, 7, 4, 1]
    """
    stride = max(1, int(GOLDEN * count))
    while math.gcd(stride, count) > 1:  # else indices would repeat
        stride += 1
    return (number * stride % count for number in range(min(most, count)))


def _digest_spread_samples(dataset: Any) -> list[str]:
    until_s, digests = time.monotonic() + LOOK_S, list[str]()
    try:
        for index in spread_indices(len(dataset), LOOKS):
            with seeded_rng("look", index):
                digests.append(digest_of(dataset[index]))
            if time.monotonic() > until_s:
                break
    except Exception:  # training meets the same error and reports it
        return []
    return digests


def count_different(then: Sequence[Any], now: Sequence[Any]) -> int:
    """Return how many of the samples that both readings digested are different.

    >>> count_different(["a", "b", "c"], ["a", "x"])
    1
    """
    return sum(old != new for old, new in zip(then, now, strict=False))


def compare_digests(then: Any, now: Sequence[str]) -> Difference | None:
    """Return the difference between two lists of digests of a dataset; None without one."""
    if not isinstance(then, list) or not (other := count_different(then, now)):
        return None
    seen = min(len(then), len(now))
    return Difference("data", f"as it was, {seen} samples looked at", f"{other} of them other ones")


def add_sample_digests(feed: ComparedLoaders, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the states of the loaders, each with the digests of its dataset."""
    return [
        {**kept, "seen": seen} if kept and (seen := feed.sample_digests(place)) else kept
        for place, kept in enumerate(states)
    ]
