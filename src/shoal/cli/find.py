"""`shoal find lr`: a learning rate to begin with, tried on the run's own model and data."""

from __future__ import annotations

import json as json_text
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from shoal.base.errors import ConfigError
from shoal.base.phases import listen, phase
from shoal.cli.words import file_and_overrides

if TYPE_CHECKING:
    from shoal.config.sections import Config
    from shoal.trainer.rate_range import RateRange

app = typer.Typer(help="Try what a run should be given: shoal find lr.", no_args_is_help=True)
ARGUMENTS = typer.Argument(None, metavar="[run.toml] [section.key=value …]")
LEAST = typer.Option(1e-7, "--from", help="The first learning rate.")
MOST = typer.Option(10.0, "--to", help="The last one.")
STEPS = typer.Option(100, "--steps", min=10, help="Optimizer steps.")
JSON = typer.Option(False, "--json", help="Rates, losses and the named value as JSON.")


@app.callback()
def options() -> None:
    """Try what a run should be given, on its own model and data."""


@app.command("lr")
def rate(
    arguments: list[str] = ARGUMENTS,
    least: float = LEAST,
    most: float = MOST,
    steps: int = STEPS,
    json: bool = JSON,
) -> None:
    """Train a fresh model for a few steps with a learning rate that grows, and draw the loss.

    On one process; nothing is written. The named value is a tenth of the rate at which the smoothed
    loss is least (Smith 2017, 1506.01186; the rule is fastai's).
    """
    if not 0 < least < most:
        raise ConfigError(
            f"--from {least:g} --to {most:g}: a rate above 0 and a larger one are wanted; nearest: "
            f"--from 1e-07 --to 10"
        )
    found = _tried(arguments or [], least, most, steps)
    if json:
        typer.echo(json_text.dumps({**asdict(found), "named": found.named}))
        return
    for line in lines_of(found):
        typer.echo(line)


def _tried(arguments: list[str], least: float, most: float, steps: int) -> RateRange:
    from shoal.cli.start import check_tune
    from shoal.config.load import load
    from shoal.config.paths import check_data, search_here
    from shoal.config.resolve import resolve_batch
    from shoal.view.phases import PhaseLine

    loaded = load(*file_and_overrides(arguments))
    search_here()
    check_data(loaded.config.data)
    check_tune(loaded.config)
    resolve_batch(loaded, 1)
    for notice in (*loaded.notices, *_left_out(loaded.config)):
        typer.echo(notice, err=True)
    waiting = PhaseLine(sys.stderr)
    listen(waiting.hear)
    try:
        with phase("import"):
            from shoal.data.sources import open_source
            from shoal.fabric import start_world
            from shoal.trainer.rate_range import range_test
        for name in ("RANK", "WORLD_SIZE"):  # one process, also inside of a job of several
            os.environ.pop(name, None)
        config = loaded.config
        source = open_source(config.data, config.train.seed)
        return range_test(config, source, start_world(), least=least, most=most, steps=steps)
    finally:
        listen(None)
        waiting.finish()


def _left_out(config: Config) -> list[str]:
    """What of a configuration a test on one process does not run."""
    words = config.layout.degrees()
    asked = " ".join(f"layout.{axis}={n}" for axis, n in words.items() if n > 1)
    if config.layout.strategy not in ("auto", "single"):
        asked = f"layout.strategy={config.layout.strategy} {asked}".strip()
    return [f"{asked}: left out, the test runs on one process"] if asked else []


def lines_of(found: RateRange, width: int = 100) -> list[str]:
    """The curve, why it ended, and the named value with its rule."""
    from shoal.teach.drawings.plot import Axis, Chart, Series, plot_lines

    top = 1.5 * max(found.smoothed[0], min(found.smoothed))
    points = tuple(zip(found.rates, (min(one, top) for one in found.smoothed), strict=True))
    chart = Chart(
        Axis("learning rate", log=True),
        Axis("smoothed loss"),
        (Series("smoothed loss", points),),
        marks=((found.named, "a tenth of the rate of the least loss"),),
        title=f"learning-rate range test, {len(found.rates)} steps",
    )
    lines = [*plot_lines(chart, width), ""]
    if found.ended:
        lines.append(f"ended: {found.ended}")
    if found.at_an_end:
        lines.append("the least loss is at an end of the range: widen it by --from or --to")
    lines.append(
        f"optimizer.lr={found.named:.1e}: a tenth of the rate at which the smoothed loss is least"
    )
    return lines
