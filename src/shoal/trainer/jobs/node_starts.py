"""Start of `shoal train` on nodes without a shared disk: rank 0 decides over the newest run.

    meet    before rank 0 settles anything: the newest checkpoint of all nodes comes to every disk,
            and with it, where it was missing, the other files of the run folder
    share   once it is settled: rank 0's files are written on the other disks, whose leases are
            acquired too

On nodes that share the run folder `meet` only checks that they do, and `share` is not called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.base.runlog.atomic_files import write_whole
from shoal.base.runlog.events import EventLog
from shoal.base.runlog.truncate_logs import mend_folder
from shoal.checkpoint.agreement.collective_phase import exchange
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.save.node_local import bring_newest
from shoal.config.load import load
from shoal.fabric import World
from shoal.trainer.jobs.out_of_memory import FILE as MICRO_BATCH
from shoal.trainer.run_folder.folder_lease import check_shared
from shoal.trainer.run_folder.node_local_resume import bring_rows


def meet(
    arguments: list[str], resume: Path | None, job: str, files: tuple[str, ...], world: World
) -> None:
    """Find out which ranks share a disk, and fetch the job's run to each; every rank calls it.

    Args:
        job: the launcher's name of it.
        files: of the run folder that go with a checkpoint.

    Raises:
        CheckpointError: the same on all ranks; a disk does not take a checkpoint, or all are
            damaged.
        ConfigError: the same on all ranks; ranks of one machine see several disks.
    """
    told = None
    if world.is_first:
        with contextlib.suppress(ShoalError, OSError):  # rank 0 raises it again soon
            base, folder = _folders(arguments, resume, job)
            base.mkdir(parents=True, exist_ok=True)
            told = [str(base), str(folder or "")]
    told = world.broadcast_json(told)
    if told is None:
        return
    check_shared(Path(told[0]), world)
    if not (world.keepers and told[1]):
        return
    folder = Path(told[1])
    emit = EventLog(folder / "events.jsonl", world.rank).emit
    found = bring_newest(folder / "checkpoints", world.keepers, world, emit, verify=False)
    if found is None or not found.lacked:
        return
    bring_rows(folder, found, world.keepers, world, emit)
    texts = world.broadcast_json(_texts(folder, files), found.source)
    exchange(world, lambda: _write(folder, texts, files if world.rank in found.lacked else ()))


def share(
    folder: Path, started: Mapping[str, Any], files: tuple[str, ...], world: World
) -> RunLease | None:
    """Write rank 0's files to the other disks, and acquire their run folders; all ranks call it.

    Args:
        started: fields of the event `run_started`.

    Raises:
        CheckpointError: the same on all ranks, if another run holds such a folder.
    """
    texts = world.broadcast_json(_texts(folder, files) if world.is_first else None)
    smaller = world.gather_json(_texts(folder, (MICRO_BATCH,)) if world.keeps else {})
    texts |= next(filter(None, smaller), {})
    kept: list[RunLease] = []

    def write() -> None:
        if not world.keeps:
            return
        if world.is_first:
            _write(folder, texts, (MICRO_BATCH,))
            return
        kept.append(RunLease(folder, folder.name))
        kept[0].acquire()
        lines = mend_folder(folder)
        _write(folder, texts, (*files, MICRO_BATCH))
        events = EventLog(folder / "events.jsonl", None)
        events.emit("run_started", **started)
        for line in lines:
            events.emit("notice", text=line)

    exchange(world, write)
    return kept[0] if kept else None


def _folders(arguments: list[str], resume: Path | None, job: str) -> tuple[Path, Path | None]:
    """Return (the parent of run folders, the folder of this run if it can be known)."""
    if resume is not None:
        return resume.parent, resume
    paths = [Path(word) for word in arguments if "=" not in word]
    run = load(paths[0] if paths else None, [word for word in arguments if "=" in word]).config.run
    name = Path(run.name or (f"job-{job}" if job else ""))
    if not name.name or name.is_absolute() or ".." in name.parts:
        return Path(run.folder), None
    return Path(run.folder), Path(run.folder) / name


def _texts(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return the contents of those files of a run folder that can be read."""

    def found() -> Iterator[tuple[str, str]]:
        for name in names:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                yield name, (folder / name).read_text(encoding="utf-8")

    return dict(found())


def _write(folder: Path, texts: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Write the named files that have a text; the names are this program's, never a peer's."""
    for name in names:
        if name in texts:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, texts[name])
