"""`shoal train`: settle everything that can be settled without torch, then start the workers.

The parent process never imports torch: it checks the request, writes the run folder, supervises the
workers and draws what they write into the folder. Under torchrun or Slurm, which start the workers
themselves, every process is a worker and rank 0 draws.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shoal import __version__
from shoal.base.errors import ConfigError, PlanError
from shoal.cli.words import ARGUMENTS, TRUST

if TYPE_CHECKING:
    from shoal.cli.start import PreparedRun

RESUME = typer.Option(
    None, "--resume", metavar="RUN", help="Go on with a run folder from its newest checkpoint."
)
FORCE = typer.Option(
    False,
    "--force",
    help="With --resume: go on with settings, code or data that change the result.",
)
VERBOSE = typer.Option(
    False, "-v", "--verbose", help="Print all lines before the first step, not five at most."
)
DRY_RUN = typer.Option(
    False, "--dry-run", help="Check everything, say what is foreseen, and start nothing."
)


def train(
    arguments: list[str] = ARGUMENTS,
    resume: Path = RESUME,
    force: bool = FORCE,
    dry_run: bool = DRY_RUN,
    trust: bool = TRUST,
    verbose: bool = VERBOSE,
) -> None:
    """Train a model. Without arguments: a small Llama on the Python standard library's source text.

    Overrides are section.key=value, for example: train.steps=100 model.dim=256 launch.processes=4
    optimizer.lr=3e-4 data.source=text:docs/how-it-works/*.md precision.compute=bf16
    layout.strategy=ddp. Ctrl-C, SIGTERM, SIGUSR1 save a checkpoint and stop (130, 143, 138); go on
    with --resume RUN. A resume stops at what would change the result (lr, schedule, code, data, …)
    and names it; --force goes on. Functions that a run.toml names are called if it is yours or
    root's, or with --trust. Exit status: 0 completed, 2 something to correct, 3 the numbers
    diverged, 1 anything else, also a stop that could not save, and an end without its checkpoint.
    """
    from shoal.cli import start, torchrun
    from shoal.view.diagnosis.run_folders import find_named_run

    if resume is not None:
        resume = find_named_run(resume)
    if torchrun.is_launched():
        raise typer.Exit(
            torchrun.train_as_worker(
                arguments or [], resume, force=force, trust=trust, verbose=verbose
            )
        )
    if force and resume is None:
        raise ConfigError("--force: goes with --resume RUN; a fresh run has nothing to differ from")
    words, folder = torchrun.continue_single_task_job(arguments or [], resume, os.environ)
    force = force or folder != resume  # a restart of the same job resumes despite any difference
    begin = f"shoal {__version__}: {f'resuming {folder}' if folder else 'preparing a run'}"
    typer.echo(begin, nl=False)
    sys.stdout.flush()
    where = ""
    try:
        prepared = start.prepare_run(words, folder, force=force, trust=trust)
        where = "" if folder else f" in {prepared.folder}"
        where += _watch_hint(prepared.folder, len(begin) + len(where))
    except KeyboardInterrupt:
        sys.stderr.write("shoal: stopped by Ctrl-C before the run began\n")
        raise typer.Exit(1) from None
    finally:
        typer.echo("" if dry_run else where)
    if line := start.no_steps_line(prepared):
        typer.echo(line)
    if dry_run:
        if folder:
            typer.echo(resume_outline(folder, prepared.loaded.config.train.steps))
        print_forecast(prepared)
        raise typer.Exit(0)
    raise typer.Exit(start.launch_run(prepared, dict(os.environ), verbose=verbose))


def resume_outline(folder: Path, steps: int) -> str:
    """Return from which step a run would go on, and how many steps are left.

    Args:
        folder: of the run; of islands, a step counts that all of them have.
        steps: of the whole run; 0 if its length is in epochs.
    """
    from shoal.base.runlog.atomic_files import list_saved_steps

    islands = [one for one in folder.glob("island-*") if one.is_dir()]
    saved = set.intersection(*(set(list_saved_steps(one)) for one in islands or [folder]))
    if not saved:
        return "goes on: from the beginning, since no complete checkpoint is there"
    newest = max(saved)
    left = f"; {max(0, steps - newest):,} steps are left" if steps else ""
    return f"goes on: from step {newest}{left}"


def _watch_hint(folder: Path, used: int) -> str:
    """Return the end of the first line; on a terminal it moves to a line of its own if it is long.

    Args:
        folder: the run folder.
        used: columns in front of it.
    """
    hint = f"to watch it: shoal watch {folder}"
    columns = shutil.get_terminal_size().columns
    is_long = sys.stdout.isatty() and used + len(f"; {hint}") > columns
    return f"\n  {hint}" if is_long else f"; {hint}"


def print_forecast(prepared: PreparedRun) -> None:
    """Print what the run would do, and a step's layout, time and memory, without a start.

    All checks of a real start come before it, so a dry run without an error can start.
    """
    from shoal.base.layouts.policies import POLICIES
    from shoal.base.text.units import bytes_text, seconds_text
    from shoal.cli.plan_subject import resolve_subject
    from shoal.cli.run_outline import outline_lines
    from shoal.forecast.search.island_choice import RATES_BYTES_PER_S, costs_by_link
    from shoal.forecast.search.layout_search import search_layouts
    from shoal.forecast.time.island_costs import IslandsFacts
    from shoal.view.island_lines import link_lines

    loaded = prepared.loaded
    config, islands = loaded.config, loaded.config.islands
    for notice in loaded.notices:
        typer.echo(notice)
    count = islands.groups if islands.on else 1
    processes = config.launch.processes
    where = f"{processes} process{'es' if processes > 1 else ''}"
    each = f" in each of {count} islands" if count > 1 else ""
    train = config.train
    typer.echo(
        f"layout: {prepared.plan.layout.text()} on {where}{each}; {train.batch} samples per step, "
        f"micro-batches of {train.micro_batch}"
    )
    typer.echo("\n".join(outline_lines(config, prepared.folder)))
    loaded.origins.setdefault("data.sequence", "default")  # a run's length, not a published one
    try:
        subject = resolve_subject(loaded, "")
        # A plan would search over recompute; a run recomputes what its configuration sets.
        best = search_layouts(subject.case, replace(subject.space, given=frozenset(POLICIES)))[0]
    except PlanError as refusal:
        typer.echo(f"not foreseen: {refusal}")
        return
    step_s = best.time.step_s
    memory = bytes_text(best.memory.peak_bytes)
    beside = "" if subject.case.cluster.device.kind != "cpu" else ", beside Python and torch"
    typer.echo(
        f"foreseen: {seconds_text(step_s)} per step, {memory} per process at the peak{beside}"
    )
    if islands.on and count > 1:
        facts = IslandsFacts(
            subject.case.model.trainable,
            step_s,
            RATES_BYTES_PER_S[0],
            tokens=train.batch * config.data.sequence,
            ranks=config.launch.processes,
        )
        costs = costs_by_link(islands, facts)
        rounds = f"{islands.epochs} epochs" if islands.epochs else f"{islands.period} steps"
        typer.echo(f"islands: {islands.method}, a merge every {rounds}")
        typer.echo("\n".join(link_lines(list(zip(RATES_BYTES_PER_S, costs, strict=True)))))
    typer.echo("nothing was started")
