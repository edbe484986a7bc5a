"""`shoal find`: search an initial learning rate and a micro-batch, on the run's model and data."""

from __future__ import annotations

import json as json_text
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError, PlanError
from shoal.cli.words import TRUST, split_arguments
from shoal.wire.phases import phase

if TYPE_CHECKING:
    from shoal.config.sections import Config
    from shoal.trainer.jobs.rate_range import RangeTestResult

app = typer.Typer(help="Try what a run should be given.", no_args_is_help=True)
ARGUMENTS = typer.Argument(None, metavar="[run.toml] [section.key=value …]")
LEAST = typer.Option(1e-7, "--from", help="The first learning rate.")
MOST = typer.Option(10.0, "--to", help="The last one.")
STEPS = typer.Option(100, "--steps", min=10, help="Optimizer steps.")
JSON = typer.Option(False, "--json", help="Rates, losses and the named value as JSON.")
MEMORY = typer.Option("", "--memory", metavar="SIZE", help="What a process may hold, as 2GiB.")
TRIES = typer.Option(False, "--json", help="The tries and the answer as JSON.")


@app.callback()
def options() -> None:
    """Try what a run should be given, on its own model and data."""


@app.command("lr")
def learning_rate(
    arguments: list[str] = ARGUMENTS,
    least: float = LEAST,
    most: float = MOST,
    steps: int = STEPS,
    json: bool = JSON,
    trust: bool = TRUST,
) -> None:
    """Train a fresh model for a few steps with a learning rate that grows, and draw the loss.

    On one process; nothing is written. The named value is a tenth of the rate at which the smoothed
    loss is least (Smith 2017, 1506.01186; the rule is fastai's).
    """
    if not 0 < least < most:
        raise ConfigError(
            f"--from {least:g} --to {most:g}: a rate above 0 and a larger one are wanted; try: "
            f"--from 1e-07 --to 10"
        )
    found = _run_range_test(arguments or [], least, most, steps, trust=trust)
    if json:
        typer.echo(json_text.dumps({**asdict(found), "named": found.named}))
        return
    for line in range_test_lines(found):
        typer.echo(line)


@app.command("micro-batch")
def micro_batch(
    arguments: list[str] = ARGUMENTS,
    memory: str = MEMORY,
    json: bool = TRIES,
    trust: bool = TRUST,
) -> None:
    """Find the largest micro-batch, a power of two, that fits under the run's own layout.

    The planner names one; that and its neighbours train three steps each in fresh processes.
    Nothing is written. Exit status: 0 with an answer, 1 where not even one sample fits.
    """
    from shoal.base.text.units import bytes_text
    from shoal.cli import torchrun
    from shoal.cli.find_batch import find_micro_batch, parse_bytes
    from shoal.cli.start import settle_run
    from shoal.config.paths import add_working_folder
    from shoal.config.trust import load_trusted

    if torchrun.is_launched():
        raise PlanError("shoal find micro-batch: starts its own processes; run it without torchrun")
    if memory:
        parse_bytes(memory)  # reports a wrong size before anything is imported
    loaded = load_trusted(*split_arguments(arguments or []), trust=trust)
    given = [key for key in ("train.batch", "train.micro_batch") if key in loaded.origins]
    add_working_folder()
    plan, _ = settle_run(loaded, None)
    if plan.layout.threads > 1 or loaded.config.islands.on:
        what = "layout.strategy = dp" if plan.layout.threads > 1 else "islands.method"
        raise PlanError(f"{what}: shoal find micro-batch tries processes of one run; try: ddp")
    batch = loaded.config.train.batch
    if given:
        typer.echo(f"{' and '.join(given)}: tries do not take it, each has its own", err=True)
    found = find_micro_batch(loaded, plan, memory, lambda line: typer.echo(line, err=True))
    size, degree = found.micro_batch, plan.layout.data_degree
    if json:
        told = {**asdict(found), "micro_batch": size, "layout": plan.layout.text()}
        typer.echo(json_text.dumps(told))
        raise typer.Exit(0 if size else 1)
    limit = f"{bytes_text(found.limit_bytes)} per process, {plan.layout.text()}"
    if not size:
        typer.echo(f"train.micro_batch=1: does not fit in {limit}")
        raise typer.Exit(1)
    after = f"{size * 2} does not" if size * 2 in found.tries else "the data give no more"
    typer.echo(f"train.micro_batch={size}: fits in {limit}; {after}")
    typer.echo(f"in run.toml, under [train]: micro_batch = {size}")
    if batch % (size * degree):
        unit = size * degree
        typer.echo(
            f"and batch = {-(-batch // unit) * unit}, since {batch} is no multiple of {unit}"
        )


def _run_range_test(
    arguments: list[str], least: float, most: float, steps: int, *, trust: bool
) -> RangeTestResult:
    from shoal.base.layouts.layout import Layout
    from shoal.base.plans.plan import Plan
    from shoal.cli.start import check_tune, settle_run_batch
    from shoal.config.paths import add_working_folder, check_data
    from shoal.config.trust import load_trusted
    from shoal.view.phase_lines import show_phases

    loaded = load_trusted(*split_arguments(arguments), trust=trust)
    add_working_folder()
    check_data(loaded.config.data)
    check_tune(loaded.config)
    settle_run_batch(loaded, Plan(Layout()))
    for notice in (*loaded.notices, *_unused_settings(loaded.config)):
        typer.echo(notice, err=True)
    with show_phases(sys.stderr):
        with phase("import"):
            from shoal.data.sources import open_source
            from shoal.fabric import start_world
            from shoal.trainer.jobs.rate_range import run_range_test
        for name in ("RANK", "WORLD_SIZE"):  # run as one process, also inside a job of several
            os.environ.pop(name, None)
        config = loaded.config
        source = open_source(config.data, config.train.seed)
        return run_range_test(config, source, start_world(), least=least, most=most, steps=steps)


def _unused_settings(config: Config) -> list[str]:
    """List the settings of a configuration that a test on one process does not use."""
    words = config.layout.degrees()
    asked = " ".join(f"layout.{axis}={n}" for axis, n in words.items() if n > 1)
    if config.layout.strategy not in ("auto", "single"):
        asked = f"layout.strategy={config.layout.strategy} {asked}".strip()
    return [f"{asked}: left out, the test runs on one process"] if asked else []


def range_test_lines(found: RangeTestResult, width: int = 100) -> list[str]:
    """Return the loss curve, the reason why the search ended, and the chosen rate with its rule."""
    from shoal.teach.drawings.plot import Chart, PlotAxis, Series, plot_lines

    top = 1.5 * max(found.smoothed[0], min(found.smoothed))
    points = tuple(zip(found.rates, (min(one, top) for one in found.smoothed), strict=True))
    chart = Chart(
        PlotAxis("learning rate", log=True),
        PlotAxis("smoothed loss"),
        (Series("smoothed loss", points),),
        marks=((found.named, "a tenth of the rate of the least loss"),),
        title=f"learning-rate range test, {len(found.rates)} steps",
    )
    lines = [*plot_lines(chart, width), ""]
    if found.ended:
        lines.append(f"ended: {found.ended}")
    if found.is_range_too_short:
        lines.append("the least loss is at an end of the range: widen it by --from or --to")
    lines.append(
        f"optimizer.lr={found.named:.1e}: a tenth of the rate at which the smoothed loss is least"
    )
    return lines
