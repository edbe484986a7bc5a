"""`shoal doctor`: check whether this machine can run training; torch only in the workers.

Alone it checks this machine, then starts as many processes as a run would and tests their links.
Under torchrun or srun the same command runs on every rank: local rank 0 of each machine checks its
machine, all ranks test their links, and rank 0 prints the results.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.base.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from shoal.machine.health_check import CheckResult

FOLDER = typer.Option("runs", "--folder", help="Where run folders are made: run.folder.")
FREE = typer.Option(1.0, "--free-gib", help="GiB that checkpoints there will need.")
PROCESSES = typer.Option(0, "--processes", help="As launch.processes; 0: as many as a run starts.")
PORT = typer.Option(0, "--port", help="One that should be free.")
AS_JSON = typer.Option(False, "--json", help="One JSON line per check.")


def doctor(
    folder: Path = FOLDER,
    free_gib: float = FREE,
    processes: int = PROCESSES,
    port: int = PORT,
    as_json: bool = AS_JSON,
) -> None:
    """Tell whether this machine is fit: clock, disk, memory, ports, versions, links, known sums.

    Exit status: 0 all is well, 1 something is wrong, 2 wrong input.
    """
    from shoal.base.estimates.facts import default_processes, read_machine_facts
    from shoal.cli.torchrun import is_launched

    for name, value, most in (
        ("--free-gib", free_gib, 2**40),
        ("--processes", processes, 1024),
        ("--port", port, 65535),
    ):
        if not 0 <= value <= most:  # also refuses NaN
            nearest = most if value > most else 0
            raise ConfigError(f"{name} {value:g}: from 0 to {most}; try: {nearest}")
    asked = (folder, free_gib, processes or default_processes(read_machine_facts()), port)
    if is_launched():
        told, wrong = _check_all_ranks(*asked)
    else:
        told = [*_check_this_machine(*asked), *_check_local_links(asked[2])]
        wrong = not all(one.ok for one in told)
    for one in told:
        typer.echo(json.dumps(one.record()) if as_json else one.line())
    if wrong:
        raise typer.Exit(1)


def _check_this_machine(
    folder: Path, free_gib: float, processes: int, port: int
) -> list[CheckResult]:
    from shoal.base.runlog.atomic_files import cache_folder
    from shoal.machine.health_check import check_machine

    return check_machine(folder, cache_folder(), int(free_gib * 2**30), processes, port)


def _check_local_links(processes: int) -> list[CheckResult]:
    """Start processes on this machine and return their results about the links between them."""
    from shoal.cli.links import run_ranks
    from shoal.machine.health_check import CheckResult

    if processes == 1:
        return [CheckResult("links", True, "one process, no links (--processes 2 tries one)")]
    try:
        return [CheckResult(**one) for one in run_ranks("shoal.cli.doctor", processes)]
    except ClusterError as failure:
        return [CheckResult("links", False, str(failure))]


def _check_all_ranks(folder: Path, free_gib: float, processes: int, port: int) -> tuple[Any, bool]:
    """Run the checks as a rank of a launcher.

    Returns:
        (results, on rank 0 only; whether any check failed).
    """
    from dataclasses import replace

    from shoal.fabric import start_world
    from shoal.machine.health_check import CheckResult
    from shoal.machine.link_check import check_links

    world = start_world()
    own: list[CheckResult] = []
    if world.local_rank == 0:
        host = socket.gethostname()
        # Only rank 0 listens at a port; the launcher's own port is in use by now.
        found = _check_this_machine(
            folder, free_gib, world.local_size, port if world.is_first else 0
        )
        own = [replace(one, host=host) for one in found]
    rows = world.gather_json([one.record() for one in own])
    told = [CheckResult(**one) for row in rows for one in row]
    told += check_links(world, world.gather_json(socket.gethostname()))
    world.close()
    return (told if world.is_first else []), not all(one.ok for one in told)


def main() -> int:
    """Run one process of the link test; rank 0 writes the results."""
    from shoal.cli.links import write_rank_result
    from shoal.fabric import start_world
    from shoal.machine.link_check import check_links

    world = start_world()
    told = check_links(world, [""] * world.size)
    if world.is_first:
        write_rank_result([one.record() for one in told])
    world.close()
    return 0


if __name__ == "__main__":
    from shoal.launch import run_and_exit

    run_and_exit(main)
