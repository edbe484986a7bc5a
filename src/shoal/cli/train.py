"""`shoal train`: settle everything that can be settled without torch, then start the workers.

The process that the user started never imports torch: it checks the request, writes the run folder,
supervises the workers and draws what they write into the folder. Under torchrun or Slurm, which
start the workers themselves, every process is a worker and rank 0 draws.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from shoal import __version__

ARGUMENTS = typer.Argument(
    None, metavar="RUN.TOML|SECTION.KEY=VALUE", help="A configuration and overrides."
)
RESUME = typer.Option(
    None, "--resume", metavar="RUN", help="Go on with a run folder from its newest checkpoint."
)
DRY_RUN = typer.Option(
    False, "--dry-run", help="Check everything, say what is foreseen, and start nothing."
)


def train(arguments: list[str] = ARGUMENTS, resume: Path = RESUME, dry_run: bool = DRY_RUN) -> None:
    """Train a model. Without arguments: a small Llama on the Python standard library's source text.

    Overrides are section.key=value, for example: train.steps=100 model.dim=256 launch.processes=4
    optimizer.lr=3e-4 data.source=text:docs/*.md precision.compute=bf16 layout.strategy=ddp.
    Ctrl-C and SIGTERM save a checkpoint and stop (exit status 130, 143); go on with --resume RUN,
    of folders that you trust: their run.toml names functions that are called.
    Exit status: 0 completed, 2 something to correct, 3 the numbers diverged, 1 anything else, also
    a stop that could not save, and an end without its checkpoint.
    """
    from shoal.cli import start, torchrun

    if torchrun.launched():
        raise typer.Exit(torchrun.run(arguments or [], resume))
    typer.echo(f"shoal {__version__}: {'resuming ' + str(resume) if resume else 'preparing a run'}")
    sys.stdout.flush()
    try:
        prepared = start.prepare(arguments or [], resume)
    except KeyboardInterrupt:
        sys.stderr.write("shoal: stopped by Ctrl-C before the run began\n")
        raise typer.Exit(1) from None
    if dry_run:
        from shoal.cli.dry_run import show

        show(prepared)
        raise typer.Exit(0)
    raise typer.Exit(start.launch(prepared, dict(os.environ)))
