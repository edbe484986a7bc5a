"""`shoal plan`: which layout would be fastest, does it fit, and why, before anything runs.

Takes what `shoal train` takes, needs no GPU, and imports torch only to look at a model of the
user's own (or with --measure).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

ARGUMENTS = typer.Argument(
    None, metavar="RUN.TOML|SECTION.KEY=VALUE", help="A configuration and overrides."
)
ON = typer.Option("", "--on", metavar="MACHINES", help='Such as "16x8xH100-80GB"; default: here.')
TOP = typer.Option(5, "--top", min=1, max=40, help="How many layouts to show.")
JSON = typer.Option(False, "--json", help="The whole plan as JSON.")
WRITE = typer.Option(None, "--write", metavar="FILE", help="Write the best layout as a run.toml.")
TABLE = typer.Option("", "--table", metavar="memory|speedup", help="A well-known table instead.")
MODELS = typer.Option("7b,13b,70b", "--models", help="For --table memory.")
GPUS = typer.Option("2,4,8,16", "--gpus", help="For the tables.")
MEASURE = typer.Option(False, "--measure", help="Measure this machine first (under a minute).")


def plan(
    arguments: list[str] = ARGUMENTS,
    on: str = ON,
    top: int = TOP,
    as_json: bool = JSON,
    write: Path = WRITE,
    table: str = TABLE,
    models: str = MODELS,
    gpus: str = GPUS,
    measure: bool = MEASURE,
) -> None:
    """Rank layouts before a run: step time, memory, what fills them, and what to change.

    Examples: shoal plan model.name=llama-3-8b --on 8xH100-80GB
    shoal plan model.build=my.module:build data.source=my.module:data launch.processes=2
    shoal plan --table memory --models 7b,70b --gpus 8,64
    Exit status: 0 something fits, 1 nothing does, 2 something to correct.
    """
    if table:
        from shoal.cli.plan_tables import print_table

        print_table(table, models, gpus, on, as_json)
        return
    if measure:
        from shoal.cli.measure import measure_here

        measure_here(arguments or [])
    record, best = _planned(arguments or [], on, top)
    if write is not None:
        from shoal.cli.plan_write import write_plan

        write_plan(best, arguments or [], write)
        record["next"] = f"shoal train {write}" if best.fits and best.built else ""
    if as_json:
        typer.echo(json.dumps(record, indent=1))
    else:
        from shoal.view.plan import print_plan

        print_plan(record, sys.stdout)
    raise typer.Exit(0 if best.fits else 1)


def _planned(arguments: list[str], on: str, top: int) -> tuple[dict[str, Any], Any]:
    """The plan's document, and its best candidate."""
    from shoal.base.errors import ConfigError
    from shoal.cli.plan_subject import find_subject
    from shoal.config.load import load
    from shoal.planner.record import plan_record
    from shoal.planner.search import search

    paths = [Path(a) for a in arguments if "=" not in a]
    if len(paths) > 1:
        raise ConfigError(f"command line: {paths[1]}: one run.toml at most; overrides have a '='")
    loaded = load(paths[0] if paths else None, [a for a in arguments if "=" in a])
    subject = find_subject(loaded, on)
    found = search(subject.model, subject.cluster, subject.asked)
    record = plan_record(found, subject.asked, top=top, notes=subject.notes)
    record["next"] = _next(found[0], record, arguments, on)
    return record, found[0]


def _next(best: Any, record: dict[str, Any], arguments: list[str], on: str) -> str:
    """What to type after reading this: a run, a plan that fits, or the plan as a file."""
    words = [word if " " not in word else f'"{word}"' for word in arguments]
    shown = [f'--on "{on}"'] if on else []
    if not best.fits:
        fix = record["fixes"][0]["set"].split() if record["fixes"] else []
        return " ".join(["shoal plan", *words, *fix, *shown]) if fix else ""
    if not on and best.built:
        case = best.case
        same = any(word.startswith("memory.recompute=") for word in words)
        wanted = case.recompute != "none" and not same
        recompute = [f"memory.recompute={case.recompute}"] if wanted else []
        return " ".join(["shoal train", *words, *recompute])
    return " ".join(["shoal plan", *words, *shown, "--write run.toml"])
