"""`shoal plan --measure`: measure this machine with as many processes as a run would have.

The facts go to the cache folder, where every later plan and run finds them
(forecast/machines/measured_machine.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import typer


def measure_this_machine(arguments: list[str]) -> None:
    """Measure this machine with the processes of this request, replacing earlier measurements.

    Raises:
        ConfigError, PlanError: the request is wrong.
    """
    from shoal.base.estimates.facts import read_machine_facts
    from shoal.base.layouts.layout import Layout
    from shoal.base.runlog.events import EventLog
    from shoal.config.load import load_config
    from shoal.config.resolve import default_processes
    from shoal.launch import supervise

    paths = [Path(a) for a in arguments if "=" not in a]
    config = load_config(paths[0] if paths else None, [a for a in arguments if "=" in a]).config
    degrees = config.layout.degrees()
    asked = config.launch.processes or (Layout.of(degrees).processes if degrees else 0)
    processes = asked or default_processes(read_machine_facts())
    typer.echo(
        f"measuring this machine with {processes} process{'es' if processes > 1 else ''}, "
        f"under a minute",
        err=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = supervise(
            [sys.executable, "-m", "shoal.cli.measure"],
            processes=processes,
            folder=Path(folder),
            restarts=0,
            emit=EventLog(Path(folder) / "events.jsonl", rank=None).emit,
            environ=dict(os.environ),
            imports=("shoal.fabric", "shoal.machine.measure"),
        )
    if outcome.exit_code:
        sys.stderr.write(f"shoal: {outcome.message}\n")
        raise typer.Exit(outcome.exit_code)


def main() -> int:
    """Run one of the measuring processes."""
    from shoal.base.runlog.atomic_files import cache_folder
    from shoal.fabric import start_world
    from shoal.machine.measure import measure_machine

    world = start_world()
    measure_machine(world, cache_folder(), again=True)
    world.close()
    return 0


if __name__ == "__main__":
    from shoal.launch import run_and_exit

    run_and_exit(main)
