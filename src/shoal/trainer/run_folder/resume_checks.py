"""Whether a run that goes on is the run that its checkpoint was taken of, and what is not.

What is compared a checkpoint keeps: settings, versions, the user's own source, and some samples of
the data. `shoal train --resume` stops at what changes the result; a loop of the user's own, whose
arguments may change on purpose, is told.
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

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.batches import turn_of
from shoal.base.runlog.environment import user_code, versions
from shoal.checkpoint.format.listing import find, read_manifest
from shoal.config.differences import Difference, of_configurations, of_surroundings, refusal
from shoal.data.loading.dataset_kind import digest_of, is_indexed
from shoal.data.loading.sample_seeds import seeded_draws
from shoal.fabric import World
from shoal.optim.named_state import plain
from shoal.parallel.program import Program
from shoal.trainer.guards.optimizer_checks import LearningRate
from shoal.trainer.metrics_recorder import Recorder

STRICT = "SHOAL_RESUME"
"""Environment variable of `shoal train`: `strict` where a difference stops a resume."""
LOOKS, LOOK_S, LOOK_AT_MOST_S = 16, 0.1, 5.0
"""Samples that are looked at, how long about, and how long another process is waited for."""
CHOSEN = "micro_batch_chosen"
"""In a checkpoint's record: the micro-batch is Shoal's choice, and follows the layout."""
GOLDEN = 0.6180339887498949
"""Steps of this share of a whole meet every part of it early, whenever one stops."""


class Looked(Protocol):
    """The loaders of a run (`run_loaders.py`), as far as their data is compared."""

    def seen(self, place: int) -> list[str]:
        """Digests of some samples of a loader's dataset."""

    def differs(self, place: int, kept: dict[str, Any]) -> Difference | None:
        """How a loader's dataset differs from that of a saved state."""


class Compared(Protocol):
    """What of a run (`run.py`) is compared."""

    program: Program
    optimizer: torch.optim.Optimizer
    rate: LearningRate
    recorder: Recorder
    extra_record: dict[str, Any]
    step_count: int

    @property
    def feed(self) -> Looked:
        """Its loaders."""


def facts_of(run: Compared) -> dict[str, Any]:
    """What a checkpoint keeps besides a plan; asked at a start, when what runs is what lies there.

    `settings` are those of `parallelize`; for `shoal train` its run.toml is kept in their place.
    """
    plan, schedule = run.program.plan, run.rate.length.schedule
    settings: dict[str, Any] = {"clip": plan.clip, "average": plan.average, "call": plan.call}
    settings |= {key: getattr(plan, key) for key in ("reduce", "compress")}
    if schedule is not None:
        told = {**asdict(schedule), "total_steps": run.rate.length.total_steps}
        settings |= {f"schedule.{key}": plain(value) for key, value in told.items()}
    else:
        for number, group in enumerate(run.optimizer.param_groups):
            settings[f"optimizer group {number}: lr as given"] = plain(group["lr"])
    return {"versions": versions(), "code": user_code(), "settings": settings}


def kept_micro_batch(folder: Path, world: World) -> int:
    """Return the micro-batch that an earlier start of a run in a folder chose; 0: none did.

    Args:
        folder: of the run; its newest checkpoint tells.
        world: all ranks, of which rank 0 reads.
    """
    size = 0
    if world.is_first:
        for found in find(folder / "checkpoints"):
            try:
                record = read_manifest(found.path).record
            except CheckpointError:
                continue  # whoever restores it says what is wrong with it
            size, batch = int(record.get("micro_batch", 0)), int(record.get("batch", 1))
            # Before 0.2 nobody wrote down who chose; an eighth was the default.
            size = size if record.get(CHOSEN, size == turn_of(batch)) else 0
            break
    return int(world.broadcast_json(size))


def compare(run: Compared, record: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Find what differs from a checkpoint that is about to be taken; all ranks call it.

    Returns:
        lines for the user, and whether anything of it changes the result.

    Raises:
        ConfigError: the same on all ranks, where `shoal train` must not go on by itself.
    """
    said: list[Any] = [[], "", False]
    if run.program.world.is_first:
        found = _differences(run, record)
        strict = os.environ.get(STRICT) == "strict" and os.environ.get("SHOAL_ATTEMPT", "0") == "0"
        if strict and "configuration" in run.extra_record:
            said[1] = refusal(f"--resume {run.recorder.folder}", int(record["step"]), found)
        said[0] = [one.line for one in found]
        said[2] = any(one.changes for one in found)
    lines, stop, changes = run.program.world.broadcast_json(said)
    if stop:
        raise ConfigError(stop)
    return list(lines), bool(changes)


@contextlib.contextmanager
def explained(run: Compared, record: Mapping[str, Any]) -> Iterator[None]:
    """Name what has changed in the configuration, where a checkpoint cannot be taken for it.

    Raises:
        CheckpointError, ConfigError: what the block raises, with the keys that have changed.
    """
    try:
        yield
    except (CheckpointError, ConfigError) as failure:
        then, now = record.get("configuration"), run.extra_record.get("configuration")
        if type(failure) not in (CheckpointError, ConfigError) or not (then and now):
            raise
        changed = [one.line for one in of_configurations(str(then), str(now)) if one.changes]
        if not changed:
            raise
        said = str(failure).partition("; try: ")[0]
        raise type(failure)(
            f"{said}; changed since step {record.get('step')}: {'; '.join(changed)}; try: put that "
            f"back, or start a new run with another run.name"
        ) from failure


def tell_resumed(run: Compared, path: Path, found: list[str], changes: bool, *, here: bool) -> None:
    """Say from which checkpoint a run goes on, and what is not as it was.

    Args:
        found, changes: as `compare` gives them.
        here: the run's folder goes on; False: a tag may be only looked at.
    """
    if run.program.world.keeps:
        told = {"differs": found, "changes_result": changes}
        run.recorder.events.emit("resumed", step=run.step_count, folder=str(path), **told)
    if found and here:
        run.recorder.warn(f"different from step {run.step_count}: {'; '.join(found)}")


def _differences(run: Compared, record: Mapping[str, Any]) -> list[Difference]:
    own, plan = run.extra_record, run.program.plan
    then, now = record.get("configuration"), own.get("configuration")
    found = []
    if isinstance(then, str) and isinstance(now, str):
        found += of_configurations(then, now)
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
    found += of_surroundings(record, own.get("code", {}))
    for place, kept in enumerate(record["data"]):
        if line := run.feed.differs(place, kept):
            found.append(line)
    return found


def look_at(dataset: Any, workers: int) -> list[str]:
    """Digests of a few samples, spread over a dataset; [] where it has no index, or raises.

    Args:
        workers: processes that read it for the run, as `read_apart` has them.

    Samples are drawn with fixed seeds, and the generators stand as before afterwards.
    """
    return read_apart(_look, dataset, workers) if is_indexed(dataset) else []


def read_apart(
    read: Callable[[Any], list[Any]], dataset: Any, workers: int, at_most_s: float = LOOK_AT_MOST_S
) -> list[Any]:
    """Return what `read` finds in a dataset, as JSON; [] where a process is needed and cannot be.

    Args:
        read: reads some samples.
        dataset: is read in this process.
        workers: processes that read it for the run. Above 0 one more reads it here too, since a
            dataset may open its files when it is first read, and workers must find them closed.
        at_most_s: how long that other process is waited for.
    """
    if not workers:
        return read(dataset)
    if not hasattr(os, "fork"):
        return []
    receiving, sending = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)  # those of the parent are not here
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
    """Yield up to `most` indices below `count`, none twice, spread wherever one stops.

    >>> list(spread_indices(10, 4))
    [0, 7, 4, 1]
    """
    stride = max(1, int(GOLDEN * count))
    while math.gcd(stride, count) > 1:  # else it would come back to the same ones
        stride += 1
    return (number * stride % count for number in range(min(most, count)))


def _look(dataset: Any) -> list[str]:
    until_s, digests = time.monotonic() + LOOK_S, list[str]()
    try:
        for index in spread_indices(len(dataset), LOOKS):
            with seeded_draws("look", index):
                digests.append(digest_of(dataset[index]))
            if time.monotonic() > until_s:
                break
    except Exception:  # whoever trains on it meets it again, and says it
        return []
    return digests


def unlike(then: Sequence[Any], now: Sequence[Any]) -> int:
    """How many of the samples that both looked at are other ones.

    >>> unlike(["a", "b", "c"], ["a", "x"])
    1
    """
    return sum(old != new for old, new in zip(then, now, strict=False))


def other_samples(then: Any, now: Sequence[str]) -> Difference | None:
    """The difference between two looks at a dataset; None where there is none."""
    if not isinstance(then, list) or not (other := unlike(then, now)):
        return None
    seen = min(len(then), len(now))
    return Difference("data", f"as it was, {seen} samples looked at", f"{other} of them other ones")


def with_looks(feed: Looked, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of loaders, each with what was seen of its dataset."""
    return [
        {**kept, "seen": seen} if kept and (seen := feed.seen(place)) else kept
        for place, kept in enumerate(states)
    ]
