"""Lease of a run folder: one run at a time owns it, shared by all ranks or one per node.

The module also starts the step traces and the checkpoint copies that are written into the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from shoal.base.errors import CheckpointError, ConfigError
from shoal.base.plans.plan import Plan
from shoal.base.runlog.truncate_logs import quarantine_damage
from shoal.checkpoint.format.lease import RunLease, read_owner
from shoal.checkpoint.format.listing import list_checkpoints
from shoal.fabric import World
from shoal.trainer.metrics_recorder import MetricsRecorder


def acquire_folder(folder: Path, world: World, tell: Callable[[str], None]) -> RunLease | None:
    """Find out which ranks share `folder`, and acquire its lease unless `shoal train` holds it.

    Args:
        tell: writes one line for the user if nodes do not share the folder, or a log is damaged.

    Raises:
        CheckpointError: the same on all ranks; another process holds the lease, and the message
            names it.
        ConfigError: the ranks of one machine do not share the folder.
    """
    taken = bool(os.environ.get("SHOAL_RUN_FOLDER"))
    if not taken:
        check_shared_folder(folder, world)
    if world.keepers:
        from shoal.trainer.run_folder.node_local_resume import format_disks_notice

        tell(format_disks_notice(folder, world))
    if taken:
        return None
    lease, refusal = None, ""
    if world.writes_files:
        try:
            lease = RunLease(folder, folder.name)
            lease.acquire()
            atexit.register(lease.release)  # a script that ends without `run.close` was not killed
        except OSError as failure:
            lease, refusal = None, format_write_refusal(folder, failure)
        except CheckpointError as failure:
            owner = read_owner(folder)
            lease = None
            if owner is None or owner.pid != os.getpid():  # several runs of one process may share
                refusal = str(failure)
    refusal = next(filter(None, world.gather_json(refusal)), "")
    if refusal:
        raise CheckpointError(refusal)
    if lease is not None:
        for line in quarantine_damage(folder):
            tell(line)
    return lease


def check_shared_folder(folder: Path, world: World) -> None:
    """Check that every rank sees the run folder of rank 0; else register one folder per node.

    Raises:
        ConfigError: the same on all ranks; ranks of one machine do not share the folder, or rank 0
            may not write there.
    """
    probe, refusal = folder / f".probe-{os.getpid()}", ""
    if world.is_first:
        try:
            probe.touch()
        except OSError as failure:
            refusal = format_write_refusal(folder, failure)
    name, refusal = world.broadcast_json([probe.name, refusal])
    if refusal:
        raise ConfigError(refusal)
    shared = world.all_true((folder / name).exists())
    if world.is_first:
        probe.unlink()
    if not shared:
        from shoal.checkpoint.save.node_local import find_keepers

        world.keepers = find_keepers(folder, world)


def format_write_refusal(folder: Path, failure: OSError) -> str:
    """Return the message for a folder that cannot be written: the reason and the owner."""
    whose = ""
    with contextlib.suppress(OSError, KeyError, ImportError):
        import pwd  # no such thing on Windows

        owner = folder.stat().st_uid
        whose = f" (it is {pwd.getpwuid(owner).pw_name}'s)" if owner != os.geteuid() else ""
    return (
        f"folder = {folder}: nothing can be written there: {failure.strerror}{whose}; try: "
        f"another folder, or a copy of this one that is yours"
    )


def refuse_old_checkpoints(folder: Path, world: World, remote: str = "") -> None:
    """Refuse to start at step 0 in a folder that holds checkpoints of an earlier run.

    Args:
        remote: address of the folder of remote copies; "" none.

    Raises:
        ConfigError: the same on all ranks; the folder, or the remote one, holds checkpoints
            that were not restored.
    """
    found = list_checkpoints(folder / "checkpoints") if world.writes_files else []
    told = world.gather_json(found[0].step if found else None)
    newest = max((step for step in told if step is not None), default=None)
    where = f"folder = {folder}"
    if newest is None and remote:
        from shoal.checkpoint.agreement.collective_phase import run_on_first_rank
        from shoal.checkpoint.remote.remote_folder import RemoteFolder

        steps = run_on_first_rank(world, RemoteFolder(remote).steps)
        newest, where = max(steps, default=None), f"remote = {remote}"
    if newest is not None:
        raise ConfigError(
            f"{where}: holds checkpoints of an earlier run, up to step {newest}; call "
            f"run.restore() before the first step to go on with it, or choose another folder"
        )


def check_folder_options(plan: Plan, folder: object) -> None:
    """Raise ConfigError for records or a remote without a run folder, or a bad remote address."""
    if folder is None:
        told = f"remote = {plan.remote}: copies what is"
        if plan.trace or plan.statistics:
            key = "trace" if plan.trace else "statistics"
            told = f"{key} = {getattr(plan, key)}: is"
        raise ConfigError(f'{told} written into the run folder; try: folder="runs/mine"')
    if plan.remote:
        from shoal.checkpoint.remote.remote_folder import check_remote

        check_remote(plan.remote)


def start_folder_writers(
    plan: Plan, folder: Path, recorder: MetricsRecorder
) -> list[Callable[[], None]]:
    """Start the trace and the remote copies of a plan; return the functions that end them."""
    ends: list[Callable[[], None]] = []
    if plan.trace:
        from shoal.trainer.step_trace import StepTrace

        recorder.trace = StepTrace(plan.trace, folder, recorder.world, recorder.notice)
        ends.append(recorder.trace.close)
    if plan.remote:
        from shoal.checkpoint.remote.upload import start_uploads

        world, hear, tell = recorder.world, recorder.add_callback, recorder.notice
        ends.append(start_uploads(folder, plan.remote, plan.keep, world, hear, tell))
    return ends
