"""`shoal train` as a worker of another launcher: torchrun, srun, Kubernetes.

Every process of the launcher runs the same command. All processes meet first. Rank 0 then settles
the request, writes the run folder and broadcasts its path, or the error, so that all ranks exit in
the same way. Rank 0 draws. A restarted job finds its folder by its name, `train_as_worker.name` or
the launcher's own for the job, and resumes from its newest checkpoint, or starts anew if there is
none yet.
With `torchrun --nnodes=1:2` the same happens when a node leaves or joins: all workers start again,
and each agent counts only its own failures. If nodes share no disk, rank 0 first receives the
newest run (`trainer/jobs/node_starts.py`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.base.errors import UNSAVED_CODE, CheckpointError, ConfigError, PlanError, ShoalError
from shoal.base.runlog.events import EventLog
from shoal.base.slurm import count_tasks
from shoal.cli.job_file import JOB_FILE, belongs_to_job, job_attempt, job_name
from shoal.wire.phases import write_phases_to_folder

if TYPE_CHECKING:
    from shoal.checkpoint.format.lease import RunLease

FILES = ("run.toml", "plan.json", JOB_FILE)
"""Files of a run folder that a start needs."""


def is_launched() -> bool:
    """Return whether torchrun or Slurm started this process as one of several."""
    env = os.environ
    torchrun = "RANK" in env and "WORLD_SIZE" in env
    return torchrun or count_tasks(env) not in ("", "1")


def train_as_worker(
    arguments: list[str],
    resume: Path | None,
    *,
    force: bool = False,
    trust: bool = False,
    verbose: bool = False,
) -> int:
    """Train as one of the launcher's processes; return the exit code.

    Args:
        force: resume although differences change the result, as a restart of the same job always
            does.
        verbose: show all lines before the first step.
    """
    from shoal.launch import run_worker

    return run_worker(lambda: _train_worker(arguments, resume, force, trust, verbose))


def _train_worker(
    arguments: list[str], resume: Path | None, force: bool, trust: bool, verbose: bool
) -> int:
    from shoal.cli.ending import UNSAVED_STATUS, SessionEnding
    from shoal.fabric import start_world
    from shoal.launch import RunOutcome
    from shoal.proof.start_proof import prove_run
    from shoal.trainer.main_job import train
    from shoal.view.summary import summarise_run

    world = start_world()
    attempt = world.all_reduce_max(job_attempt(os.environ))
    force = force or attempt > 0
    if world.local_size < world.size:  # on several machines
        from shoal.trainer.jobs.node_starts import sync_newest_run

        sync_newest_run(arguments, resume, job_name(os.environ), FILES, world)
    answer: dict[str, Any] = {}
    lease = None
    if world.is_first:
        answer, lease = _settle_on_rank_0(
            arguments, resume, attempt, world.size, force=force, trust=trust
        )
    answer = world.broadcast_json(answer)
    if "error" in answer:
        if not world.is_first:
            return 2  # rank 0 prints the reason
        kinds = {"PlanError": PlanError, "CheckpointError": CheckpointError}
        raise kinds.get(answer["kind"], ConfigError)(answer["error"])
    folder = Path(answer.pop("folder"))
    if world.keepers:
        from shoal.trainer.jobs.node_starts import write_start_files

        lease = write_start_files(folder, answer, FILES, world) or lease
    os.environ["SHOAL_RUN_FOLDER"] = str(folder)
    log = EventLog(folder / "events.jsonl", world.rank)
    log.emit("worker_started", pid=os.getpid(), attempt=attempt)
    stop = None
    if world.is_first:
        stop = _start_live_view(folder, verbose)
        write_phases_to_folder(folder)
    try:
        code = train(folder, prove_run, world=world)
    finally:
        if stop is not None:
            stop()
        if lease is not None:
            lease.release()
    how = {0: "finished", UNSAVED_CODE: "unsaved"}.get(code, "stopped")
    code = UNSAVED_STATUS if code == UNSAVED_CODE else code
    if world.rank == 0:
        outcome = RunOutcome(how, code, 1, "the last checkpoint could not be written")
        ending = SessionEnding.of(folder)
        if how == "unsaved":
            sys.stderr.write(f"shoal: {ending.error_line(outcome)}\n")
        sys.stdout.write(f"{summarise_run(folder)}\n{ending.next_command_lines(outcome)}\n")
    return code


def _settle_on_rank_0(
    arguments: list[str],
    resume: Path | None,
    attempt: int,
    size: int,
    *,
    force: bool,
    trust: bool,
) -> tuple[dict[str, Any], RunLease | None]:
    """Return rank 0's broadcast, the run folder or an error, and its lease on the folder."""
    from shoal.checkpoint.format.lease import RunLease
    from shoal.cli.start import prepare_run, write_run_folder

    try:
        again = continue_job(arguments, resume, os.environ, attempt)
        prepared = prepare_run(*again, size, force=force, trust=trust)
        os.environ["SHOAL_RESUME"] = "strict" if prepared.resumed and not force else ""
        (prepared.folder / "logs").mkdir(parents=True, exist_ok=True)
        lease = RunLease(prepared.folder, prepared.loaded.config.run.name)
        lease.acquire()
        write_run_folder(prepared, attempt)
        (prepared.folder / JOB_FILE).write_text(job_name(os.environ), encoding="utf-8")
    except ShoalError as failure:
        return {"error": str(failure), "kind": type(failure).__name__}, None
    except OSError as failure:
        text = f"{failure.filename}: {failure.strerror}"
        return {"error": text, "kind": "ConfigError"}, None
    started = {"processes": size, "layout": prepared.plan.layout.text()}
    started |= {"resumed": prepared.resumed, "attempt": attempt}
    return {"folder": str(prepared.folder), **started}, lease


def continue_job(
    arguments: list[str], resume: Path | None, environ: Mapping[str, str], attempt: int
) -> tuple[list[str], Path | None]:
    """Choose arguments and resume folder for an attempt of a job, whose restarts share a folder.

    Args:
        arguments: configuration file and `key=value` overrides of the command.
        resume: folder given to --resume; None without one.
        environ: environment, with the scheduler's job.
        attempt: restarts of the job, the maximum over all ranks; 0 also if the job gained nodes:
            then the folder records that it belongs to this job.

    Returns:
        (arguments, folder to resume); None: a new run.

    Raises:
        ConfigError: a restarted job's folder has no name, so it cannot be found; or a folder of
            this name may belong to this job, and no record confirms it.
    """
    from shoal.checkpoint.format.listing import list_checkpoints
    from shoal.config.load import load_config

    if resume is not None:
        return arguments, resume
    overrides = [a for a in arguments if "=" in a]
    paths = [Path(a) for a in arguments if "=" not in a]
    run = load_config(paths[0] if paths else None, overrides).config.run
    name, job = run.name, job_name(environ)
    if not name:
        if not job and attempt:
            raise ConfigError(
                f"run.name: is empty at restart {attempt}, and the launcher has no name for the "
                f"job, so its folder cannot be found again; set run.name=NAME"
            )
        if not job:
            return arguments, None
        name = f"job-{job}"
        arguments, overrides = [*arguments, f"run.name={name}"], [*overrides, f"run.name={name}"]
    folder = Path(run.folder) / name
    if not list_checkpoints(folder / "checkpoints"):
        return arguments, None
    if attempt or belongs_to_job(folder, job):
        return overrides, folder  # the folder's run.toml holds the keys of the given file
    if not job and "TORCHELASTIC_RUN_ID" in environ:
        raise ConfigError(
            f"run.name = {name}: {folder} holds a run already; to go on with it: --resume "
            f"{folder}; so that it goes on by itself when nodes come or leave: torchrun "
            f"--rdzv-id={name}"
        )
    return arguments, None


def continue_single_task_job(
    arguments: list[str], resume: Path | None, environ: Mapping[str, str]
) -> tuple[list[str], Path | None]:
    """Choose arguments and resume folder for a job of one task, which starts its ranks itself.

    Only a restart of the same job resumes: one allocation may start many runs, one after another.

    Args:
        arguments: configuration file and `key=value` overrides of the command.
        resume: folder given to --resume; None without one.
        environ: environment, with the scheduler's job and its restarts.

    Returns:
        (arguments, folder to resume); as given, unless the job restarted and owns the run's folder.
    """
    from shoal.config.load import load_config

    attempt, job = job_attempt(environ), job_name(environ)
    if resume is not None or not attempt or not job:
        return arguments, resume
    paths = [Path(a) for a in arguments if "=" not in a]
    run = load_config(paths[0] if paths else None, [a for a in arguments if "=" in a]).config.run
    if not run.name or not belongs_to_job(Path(run.folder) / run.name, job):
        return arguments, resume
    return continue_job(arguments, resume, environ, attempt)


def _start_live_view(folder: Path, verbose: bool) -> Any:
    """Draw the run from its folder in a thread; return the function that ends the thread."""
    from shoal.view.live import OPENING_LINES, LiveView

    most = None if verbose else OPENING_LINES
    view = LiveView(folder, stream=sys.stdout, colour=True, most_opening_lines=most)
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(0.2):
            view.tick()
        view.finish()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join(timeout=5)

    return stop
