"""`shoal train` as a worker of somebody else's launcher: torchrun, srun, Kubernetes.

Every process of the launcher runs the same command. They meet first; rank 0 then settles the
request, writes the run folder and tells the others where it is, or why not, so that all of them
exit alike. Rank 0 draws. A restarted job goes on from its newest checkpoint by itself.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from shoal.base.errors import CheckpointError, ConfigError, PlanError, ShoalError


def launched() -> bool:
    """Whether torchrun or Slurm started this process as one of several."""
    env = os.environ
    torchrun = "RANK" in env and "WORLD_SIZE" in env
    return torchrun or ("SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") != "1")


def run(arguments: list[str], resume: Path | None) -> int:
    """Train as one of the launcher's processes; gives the exit code."""
    from shoal.launch import run_worker

    return run_worker(lambda: _work(arguments, resume))


def _work(arguments: list[str], resume: Path | None) -> int:
    from shoal.checkpoint.lease import RunLease
    from shoal.cli.start import next_command, prepare, write_folder
    from shoal.fabric import start_world
    from shoal.trainer.loop import train
    from shoal.view.summary import summary

    world = start_world()
    answer: dict[str, Any] = {}
    lease = None
    if world.is_first:
        try:
            prepared = prepare(_named(arguments), _restarted(arguments) or resume, world.size)
            prepared.folder.mkdir(parents=True, exist_ok=True)
            lease = RunLease(prepared.folder, prepared.loaded.config.run.name)
            lease.acquire()
            write_folder(prepared)
            answer = {"folder": str(prepared.folder)}
        except ShoalError as failure:
            answer = {"error": str(failure), "kind": type(failure).__name__}
    answer = world.broadcast_json(answer)
    if "error" in answer:
        if not world.is_first:
            return 2  # rank 0 says why
        kinds = {"PlanError": PlanError, "CheckpointError": CheckpointError}
        raise kinds.get(answer["kind"], ConfigError)(answer["error"])
    folder = Path(answer["folder"])
    os.environ["SHOAL_RUN_FOLDER"] = str(folder)
    (folder / "logs").mkdir(exist_ok=True)
    stop = _draw(folder) if world.is_first else None
    try:
        code = train(folder, world=world)
    finally:
        if stop is not None:
            stop()
        if lease is not None:
            lease.release()
    if world.rank == 0:
        sys.stdout.write(f"{summary(folder)}\n{next_command(folder, code)}\n")
    return code


def _named(arguments: list[str]) -> list[str]:
    """A job that its launcher can name keeps one folder over restarts."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none" or any(a.startswith("run.name=") for a in arguments):
        return arguments
    return [*arguments, f"run.name=job-{job}"]


def _restarted(arguments: list[str]) -> Path | None:
    """The folder of this job's earlier attempt, if this is not the first and it saved something."""
    from shoal.checkpoint.catalog import find
    from shoal.config.load import load

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT")
    if attempt in (None, "0"):
        return None
    paths = [Path(a) for a in arguments if "=" not in a]
    overrides = [a for a in _named(arguments) if "=" in a]
    run = load(paths[0] if paths else None, overrides).config.run
    folder = Path(run.folder) / run.name
    return folder if run.name and find(folder / "checkpoints") else None


def _draw(folder: Path) -> Any:
    """Draw the run from its folder in a thread; gives the function that ends it."""
    from shoal.view.live import LiveView

    view = LiveView(folder, stream=sys.stdout, colour=True)
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
