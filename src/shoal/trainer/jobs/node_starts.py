"""Start of `shoal train` on nodes without a shared disk: rank 0 decides over the newest run.

    meet    before rank 0 settles anything: the newest checkpoint of all nodes comes to every disk,
            and with it, where it was missing, the other files of the run folder
    share   once it is settled: rank 0's files are written on the other disks, whose leases are
            acquired too

On nodes that share the run folder `sync_newest_run` only checks that they do, and
`write_start_files` is not called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.base.errors import ShoalError
from shoal.base.runlog.atomic_files import write_atomically
from shoal.base.runlog.events import EventLog
from shoal.base.runlog.truncate_logs import quarantine_damage
from shoal.checkpoint.agreement.collective_phase import gather_results
from shoal.checkpoint.format.lease import RunLease
from shoal.checkpoint.save.node_local import sync_newest
from shoal.config.load import load_config
from shoal.fabric import World
from shoal.trainer.jobs.out_of_memory import FILE as MICRO_BATCH
from shoal.trainer.run_folder.folder_lease import check_shared_folder
from shoal.trainer.run_folder.node_local_resume import sync_metrics_rows


def sync_newest_run(
    arguments: list[str], resume: Path | None, job: str, files: tuple[str, ...], world: World
) -> None:
    """Find which ranks share a disk, and copy the job's run to each disk; every rank calls it.

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
            base, folder = _resolve_folders(arguments, resume, job)
            base.mkdir(parents=True, exist_ok=True)
            told = [str(base), str(folder or "")]
    told = world.broadcast_json(told)
    if told is None:
        return
    check_shared_folder(Path(told[0]), world)
    if not (world.keepers and told[1]):
        return
    folder = Path(told[1])
    emit = EventLog(folder / "events.jsonl", world.rank).emit
    found = sync_newest(folder / "checkpoints", world.keepers, world, emit, verify=False)
    if found is None or not found.lacked:
        return
    sync_metrics_rows(folder, found, world.keepers, world, emit)
    texts = world.broadcast_json(_read_files(folder, files), found.source)
    gather_results(
        world, lambda: _write(folder, texts, files if world.rank in found.lacked else ())
    )


def write_start_files(
    folder: Path, started: Mapping[str, Any], files: tuple[str, ...], world: World
) -> RunLease | None:
    """Write rank 0's files to the other disks, and acquire their run folders; all ranks call it.

    Args:
        started: fields of the event `run_started`.

    Raises:
        CheckpointError: the same on all ranks, if another run holds such a folder.
    """
    texts = world.broadcast_json(_read_files(folder, files) if world.is_first else None)
    smaller = world.gather_json(_read_files(folder, (MICRO_BATCH,)) if world.writes_files else {})
    texts |= next(filter(None, smaller), {})
    kept: list[RunLease] = []

    def write() -> None:
        if not world.writes_files:
            return
        if world.is_first:
            _write(folder, texts, (MICRO_BATCH,))
            return
        kept.append(RunLease(folder, folder.name))
        kept[0].acquire()
        lines = quarantine_damage(folder)
        _write(folder, texts, (*files, MICRO_BATCH))
        events = EventLog(folder / "events.jsonl", None)
        events.emit("run_started", **started)
        for line in lines:
            events.emit("notice", text=line)

    gather_results(world, write)
    return kept[0] if kept else None


def _resolve_folders(
    arguments: list[str], resume: Path | None, job: str
) -> tuple[Path, Path | None]:
    """Return (the parent of run folders, the folder of this run if it can be known)."""
    if resume is not None:
        return resume.parent, resume
    paths = [Path(word) for word in arguments if "=" not in word]
    run = load_config(
        paths[0] if paths else None, [word for word in arguments if "=" in word]
    ).config.run
    name = Path(run.name or (f"job-{job}" if job else ""))
    if not name.name or name.is_absolute() or ".." in name.parts:
        return Path(run.folder), None
    return Path(run.folder), Path(run.folder) / name


def _read_files(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
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
            write_atomically(folder / name, texts[name])
